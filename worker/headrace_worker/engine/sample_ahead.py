"""Sampling that nobody waits for: the tokens stay on the device, and the host hears of them later.

The same tokens as the sampler's, to the bit: both call the same draws. A row is left in doubt where
the first candidates of a draw may not be all that count. That is decided on the host, and whoever
has read the token by then is told.
"""

from __future__ import annotations

from collections.abc import Sequence as ReadOnlyList

import torch

from headrace_worker.engine.adjust import adjust_logits
from headrace_worker.engine.draw import draw_ahead, draw_tokens
from headrace_worker.engine.messages import SampledToken, SequenceFailure
from headrace_worker.engine.sampler import find_failures, is_greedy, make_draw, max_of_rows
from headrace_worker.engine.sequence import Sequence
from headrace_worker.engine.transfer import HostCopy, to_device


class SampledAhead:
    """The next tokens of sequences whose wishes can all be met on the device."""

    def __init__(
        self,
        logits: torch.Tensor,  # [num_rows, vocab] float32
        seqs: ReadOnlyList[Sequence],
    ) -> None:
        self._seqs = seqs
        self._adjusted = adjust_logits(logits, seqs)  # kept for the rows in doubt
        self._draws = {
            row: make_draw(seq) for row, seq in enumerate(seqs) if not is_greedy(seq.sampling)
        }
        maxima, self.tokens = max_of_rows(self._adjusted)  # [num_rows] each
        model_maxima = maxima if self._adjusted is logits else logits.amax(-1)
        self._drawn = draw_ahead(self._adjusted, self._draws)
        if self._draws:
            rows = to_device(torch.tensor(self._drawn.rows), logits.device)
            self.tokens = self.tokens.index_copy(0, rows, self._drawn.tokens)
        self._copy = HostCopy(
            self.tokens, model_maxima.isfinite(), maxima.isfinite(), self._drawn.is_sure
        )
        self.corrected: frozenset[int] = frozenset()  # seq_ids, once collected

    def collect(self) -> list[SampledToken | SequenceFailure]:
        """Wait for the tokens; a row without a finite maximum fails alone."""
        tokens, model_is_sound, row_is_sound, is_sure = self._copy.wait()
        failures = find_failures(model_is_sound, row_is_sound, self._seqs)
        chosen: list[int] = tokens.tolist()
        doubted = {
            row: self._draws[row]
            for row, sure in zip(self._drawn.rows, is_sure.tolist(), strict=True)
            if not sure and row not in failures
        }
        again = draw_tokens(self._adjusted, doubted)
        wrong = [row for row, token in again.items() if token != chosen[row]]
        self.corrected = frozenset(self._seqs[row].seq_id for row in wrong)
        for row in wrong:
            chosen[row] = again[row]
        return [
            failures.get(row) or SampledToken(seq.seq_id, chosen[row])
            for row, seq in enumerate(self._seqs)
        ]
