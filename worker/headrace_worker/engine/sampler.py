"""From logits to tokens: changes that requests ask for, the draw, and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence as ReadOnlyList

import torch

from headrace_worker.engine.adjust import adjust_logits, needs_adjustment
from headrace_worker.engine.draw import Draw, draw_tokens, uniform
from headrace_worker.engine.messages import SampledToken, SamplingSpec, SequenceFailure, TokenScore
from headrace_worker.engine.scores import MAX_ROWS, score_tokens
from headrace_worker.engine.sequence import Sequence
from headrace_worker.kernels import kernels_are_loaded

GREEDY_TEMPERATURE = 1e-3  # at or below it the most likely token is taken: dividing would overflow


def sample(
    logits: torch.Tensor,  # [num_rows, vocab], float32 or what the model computes in
    seqs: ReadOnlyList[Sequence],
) -> list[SampledToken | SequenceFailure]:
    """Choose the next token of each sequence; a row without a finite maximum fails alone."""
    if not all(map(_wants_the_most_likely, seqs)):
        logits = logits.float()
    adjusted = adjust_logits(logits, seqs)
    maxima, most_likely = max_of_rows(adjusted)
    tokens: list[int] = most_likely.tolist()
    model_maxima = maxima if adjusted is logits else logits.amax(-1)
    failures = find_failures(torch.isfinite(model_maxima), torch.isfinite(maxima), seqs)
    draws = {
        row: make_draw(seq)
        for row, seq in enumerate(seqs)
        if row not in failures and not is_greedy(seq.sampling)
    }
    for row, token in draw_tokens(adjusted, draws).items():
        tokens[row] = token
    scores = _score(logits, tokens, {r: s for r, s in enumerate(seqs) if r not in failures})
    return [
        failures.get(row) or _describe(seq, tokens[row], scores.get(row))
        for row, seq in enumerate(seqs)
    ]


def max_of_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's maximum, NaN if there is one, and the first index that has it."""
    is_usual = logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.bfloat16)
    if is_usual and kernels_are_loaded():
        maxima, places = torch.ops.headrace.max_of_rows(logits)
        return maxima, places
    return torch.max(logits, -1)


def is_greedy(spec: SamplingSpec) -> bool:
    """Say whether only the most likely token can come out."""
    return spec.temperature <= GREEDY_TEMPERATURE or spec.top_k == 1 or spec.top_p <= 0


def _wants_the_most_likely(seq: Sequence) -> bool:
    """Say whether a look at its row is all it takes; what computes on rows has them in float32."""
    spec = seq.sampling
    return is_greedy(spec) and spec.logprobs is None and not needs_adjustment(seq)


def find_failures(
    model_is_sound: torch.Tensor,  # [num_rows] bool, whether the model's maximum is finite
    row_is_sound: torch.Tensor,  # [num_rows] bool, the same of what the requests made of the row
    seqs: ReadOnlyList[Sequence],
) -> dict[int, SequenceFailure]:
    """Return which rows have no token to choose, and whose fault that is."""
    is_sound: list[bool] = model_is_sound.tolist()
    has_choice: list[bool] = row_is_sound.tolist()
    failures = {}
    for row, seq in enumerate(seqs):
        if not is_sound[row]:
            message = f"the logits of token {len(seq.token_ids)} have no finite maximum"
            failures[row] = SequenceFailure(seq.seq_id, "engine_failure", message)
        elif not has_choice[row]:
            failures[row] = SequenceFailure(seq.seq_id, "invalid_request", _why_no_choice(seq))
    return failures


def _why_no_choice(seq: Sequence) -> str:
    if seq.grammar is None:
        return f"bias, penalties and masks leave no token to choose as {len(seq.token_ids)}"
    if error := seq.grammar.error:
        return f"the grammar cannot go on at token {len(seq.token_ids)}: {error}"
    return (
        "the grammar and the other options contradict each other:"
        f" they leave no token to choose as {len(seq.token_ids)}"
    )


def make_draw(seq: Sequence) -> Draw:
    """Return how a sequence's next token is drawn."""
    spec = seq.sampling
    number = uniform(spec.seed, seq.num_tokens)
    return Draw(number, spec.temperature, spec.top_k, spec.top_p, spec.min_p)


def _score(
    logits: torch.Tensor, tokens: list[int], usable: dict[int, Sequence]
) -> dict[int, TokenScore]:
    """Score the chosen tokens of the rows that ask, some rows at a time."""
    counts = {r: s.sampling.logprobs for r, s in usable.items() if s.sampling.logprobs is not None}
    asked = list(counts)
    scores: dict[int, TokenScore] = {}
    for start in range(0, len(asked), MAX_ROWS):
        rows = asked[start : start + MAX_ROWS]
        of_rows = _take(logits, rows)
        told = score_tokens(of_rows, [tokens[row] for row in rows], [counts[row] for row in rows])
        scores.update(zip(rows, told, strict=True))
    return scores


def _take(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return these rows; neighbours in a row, as when all ask, are not copied."""
    first, end = rows[0], rows[-1] + 1
    return logits[first:end] if end - first == len(rows) else logits[rows]


def _describe(seq: Sequence, token: int, score: TokenScore | None) -> SampledToken:
    if score is None:
        return SampledToken(seq.seq_id, token)
    return SampledToken(seq.seq_id, token, score.logprob, score.top_logprobs)
