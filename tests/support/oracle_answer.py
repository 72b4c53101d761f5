"""What a request must get from the oracle, in plain Python over its token list: without an engine.

Written from the promises in the README and in ``SamplingSpec``, not from the sampler's code. Draws
need ``exp``, which differs in its last bits between libraries, so a draw that falls on the border
between two tokens may come out as either; it is a near-tie, and counted.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from headrace_worker.engine.messages import AddSequence, SamplingSpec, SequenceFinish
from support.oracle_model import exact_logits

_NEVER = float("-inf")
_BORDER = 1e-5  # relative; float32 and float64 differ by less in what they draw from


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ends."""

    tokens: tuple[int, ...]  # since the prompt
    reason: SequenceFinish | None  # None: it fails, because the row after these tokens is NaN


def whole_answer(command: AddSequence, *, max_model_len: int, poison: int | None = None) -> Ending:
    """Return everything that a sequence gets, from the tokens that it comes with to its end."""
    token_ids = list(command.token_ids)
    while (reason := finish_reason(command, token_ids, max_model_len)) is None:
        if token_ids[-1] == poison:
            break
        token_ids.append(next_token(command, token_ids))
    return Ending(tuple(token_ids[command.num_prompt_tokens :]), reason)


def finish_reason(
    command: AddSequence, token_ids: Sequence[int], max_model_len: int
) -> SequenceFinish | None:
    """Say why a sequence with these tokens is over, or None while it has to go on."""
    num_output = len(token_ids) - command.num_prompt_tokens
    if num_output and token_ids[-1] in command.sampling.stop_token_ids:
        return SequenceFinish.STOP
    if num_output >= command.sampling.max_tokens or len(token_ids) >= max_model_len:
        return SequenceFinish.LENGTH
    return None


def next_token(command: AddSequence, token_ids: Sequence[int]) -> int:
    """Return the token that follows ``token_ids``, prompt and output so far."""
    return choose_token(exact_logits(token_ids), command, token_ids)


def choose_token(row: list[float], command: AddSequence, token_ids: Sequence[int]) -> int:
    """Return the token that this row of logits, which is changed, gives after ``token_ids``."""
    _adjust(row, command, token_ids)
    return _choose(row, command.sampling, len(token_ids))


def is_near_tie(command: AddSequence, token_ids: Sequence[int], token_id: int) -> bool:
    """Say whether ``token_id`` would follow if draw or filters were off by a hair."""
    row, place = exact_logits(token_ids), len(token_ids)
    _adjust(row, command, token_ids)
    nudges = (-_BORDER, _BORDER)
    return token_id in {
        _choose(row, command.sampling, place, nudge_draw=draw, nudge_filters=filters)
        for draw in nudges
        for filters in nudges
    }


def log_softmax(row: Sequence[float]) -> list[float]:
    """Return the natural logs of the probabilities of a row."""
    top = max(row)
    total = top + math.log(sum(math.exp(value - top) for value in row))
    return [value - total for value in row]


def _adjust(row: list[float], command: AddSequence, token_ids: Sequence[int]) -> None:
    """Bias, then penalties, then what may not be said."""
    spec = command.sampling
    output = list(token_ids[command.num_prompt_tokens :])
    for token_id, bias in spec.logit_bias:
        row[token_id] += bias
    for token_id in set(token_ids):
        penalty = spec.repetition_penalty
        row[token_id] = row[token_id] / penalty if row[token_id] > 0 else row[token_id] * penalty
    for token_id, count in Counter(output).items():
        row[token_id] -= spec.presence_penalty + spec.frequency_penalty * count
    for run in spec.bad_words:
        begun = len(run) - 1
        if begun <= len(output) and output[len(output) - begun :] == list(run[:-1]):
            row[run[-1]] = _NEVER
    if len(output) < spec.min_tokens:
        for token_id in spec.stop_token_ids:
            row[token_id] = _NEVER


def _choose(
    row: list[float],
    spec: SamplingSpec,
    place: int,
    *,
    nudge_draw: float = 0.0,
    nudge_filters: float = 0.0,
) -> int:
    top = max(row)
    if spec.temperature == 0 or spec.top_k == 1:
        return row.index(top)
    weights = [math.exp((value - top) / spec.temperature) for value in row]
    kept = _filtered(weights, spec, nudge_filters)
    total = sum(weights[token_id] for token_id in kept)
    target = (_uniform(spec.seed, place) + nudge_draw) * total
    for token_id in kept:
        target -= weights[token_id]
        if target < 0:
            return token_id
    return next(token_id for token_id in reversed(kept) if weights[token_id] > 0)


def _filtered(weights: list[float], spec: SamplingSpec, nudge: float) -> list[int]:
    """Return the ids to draw from: by id, or the most likely first when top-k or top-p cut."""
    kept = list(range(len(weights)))
    if 0 < spec.top_k < len(weights) or spec.top_p < 1:
        kept.sort(key=lambda token_id: -weights[token_id])
        kept = kept[: spec.top_k or None]
        limit = (spec.top_p + nudge) * sum(weights[token_id] for token_id in kept)
        before, count = 0.0, 0
        while count < len(kept) and (spec.top_p >= 1 or before < limit):
            before += weights[kept[count]]
            count += 1
        kept = kept[: max(1, count)]
    return [token_id for token_id in kept if weights[token_id] >= spec.min_p + nudge] or kept[:1]


def _uniform(seed: int, place: int) -> float:
    """A number in [0, 1) for each seed and place: 53 bits of their blake2b hash."""
    digest = blake2b(struct.pack("<QQ", seed, place), digest_size=8, person=b"headrace.draw")
    return (int.from_bytes(digest.digest(), "little") >> 11) / 2**53
