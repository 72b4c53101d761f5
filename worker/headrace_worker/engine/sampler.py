"""From logits to tokens: bias, penalties, min-tokens mask, temperature, filters, draw."""

from __future__ import annotations

from collections.abc import Sequence as ReadOnlyList

import torch

from headrace_worker.engine.adjust import adjust_logits, needs_adjustment
from headrace_worker.engine.draw import Draw, draw_tokens, uniform
from headrace_worker.engine.messages import SampledToken, SamplingSpec, SequenceFailure
from headrace_worker.engine.sequence import Sequence

GREEDY_TEMPERATURE = 1e-3  # at or below it the most likely token is taken: dividing would overflow
LOGPROB_FLOOR = -9999.0  # finite, because JSON knows no infinity


def sample(
    logits: torch.Tensor,  # [num_rows, vocab] float32
    seqs: ReadOnlyList[Sequence],
) -> list[SampledToken | SequenceFailure]:
    """Choose the next token of each sequence; a row without a finite maximum fails alone."""
    raw = logits
    to_adjust = [row for row, seq in enumerate(seqs) if needs_adjustment(seq)]
    if to_adjust:
        logits = logits.clone()
        for row in to_adjust:
            adjust_logits(logits[row], seqs[row])
    maxima, most_likely = logits.max(-1)
    tokens: list[int] = most_likely.tolist()
    is_usable: list[bool] = torch.isfinite(maxima).tolist()
    draws = {
        row: _draw(seq)
        for row, seq in enumerate(seqs)
        if is_usable[row] and not is_greedy(seq.sampling)
    }
    for row, token in draw_tokens(logits, draws).items():
        tokens[row] = token
    logprobs = _Logprobs(raw)
    return [
        logprobs.describe(row, seq, tokens[row]) if is_usable[row] else _unusable_row(seq)
        for row, seq in enumerate(seqs)
    ]


def is_greedy(spec: SamplingSpec) -> bool:
    """Say whether only the most likely token can come out."""
    return spec.temperature <= GREEDY_TEMPERATURE or spec.top_k == 1 or spec.top_p <= 0


def _draw(seq: Sequence) -> Draw:
    spec = seq.sampling
    number = uniform(spec.seed, seq.num_tokens)
    return Draw(number, spec.temperature, spec.top_k, spec.top_p, spec.min_p)


class _Logprobs:
    """Log-probabilities of the model itself, before any adjustment, for the rows that ask."""

    def __init__(self, raw: torch.Tensor) -> None:
        self._raw = raw  # [num_rows, vocab]

    def describe(self, row: int, seq: Sequence, token: int) -> SampledToken:
        """Return the sampled token, with its own and the k best log-probabilities where wanted."""
        k = seq.sampling.logprobs
        if k is None:
            return SampledToken(seq.seq_id, token)
        logprobs = self._raw[row].log_softmax(-1).clamp(min=LOGPROB_FLOOR)
        values, token_ids = logprobs.topk(min(k, logprobs.shape[0]))
        best = tuple(zip(token_ids.tolist(), values.tolist(), strict=True))
        return SampledToken(seq.seq_id, token, logprobs[token].item(), best)


def _unusable_row(seq: Sequence) -> SequenceFailure:
    message = f"the logits of token {seq.num_tokens} have no finite maximum"
    return SequenceFailure(seq.seq_id, "engine_failure", message)
