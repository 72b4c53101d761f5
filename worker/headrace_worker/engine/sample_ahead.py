"""Sampling that nobody waits for: the tokens stay on the device, and the host hears of them later.

The same tokens as the sampler's, to the bit: both call the same draws. A row is left in doubt where
the first candidates of a draw may not be all that count. That is decided on the host, and whoever
has read the token by then is told.
"""

from __future__ import annotations

from collections.abc import Sequence as ReadOnlyList

import torch

from headrace_worker.engine.adjust import adjust_logits
from headrace_worker.engine.draw import draw_ahead
from headrace_worker.engine.messages import SampledToken, SequenceFailure
from headrace_worker.engine.sampler import find_failures, is_greedy, make_draw, max_of_rows
from headrace_worker.engine.second_draw import draw_in_room
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
        adjusted = adjust_logits(logits, seqs)
        self._draws = {
            row: make_draw(seq) for row, seq in enumerate(seqs) if not is_greedy(seq.sampling)
        }
        maxima, self.tokens = max_of_rows(adjusted)  # [num_rows] each
        model_maxima = maxima if adjusted is logits else logits.amax(-1)
        self._drawn = draw_ahead(adjusted, self._draws)
        # For the rows in doubt, until they are collected; None: no row can be.
        self._adjusted = adjusted if self._drawn.may_be_unsure else None
        if self._draws:
            rows = to_device(torch.tensor(self._drawn.rows), logits.device)
            self.tokens = self.tokens.index_copy(0, rows, self._drawn.tokens)
        self._copy = HostCopy(
            self.tokens, model_maxima.isfinite(), maxima.isfinite(), self._drawn.is_sure
        )
        self.corrected: frozenset[int] = frozenset()  # seq_ids, once collected

    def collect(self) -> list[SampledToken | SequenceFailure]:
        """Wait for the tokens; a row without a finite maximum fails alone.

        So does one in doubt for which the device has no memory, even if nothing else is drawn.
        """
        tokens, model_is_sound, row_is_sound, is_sure = self._copy.wait()
        failures = find_failures(model_is_sound, row_is_sound, self._seqs)
        chosen: list[int] = tokens.tolist()
        doubted = [
            row
            for row, sure in zip(self._drawn.rows, is_sure.tolist(), strict=True)
            if not sure and row not in failures
        ]
        again = self._draw_again(doubted)
        for row in doubted:
            if row not in again:
                failures[row] = _without_memory(self._seqs[row])
        wrong = [row for row, token in again.items() if token != chosen[row]]
        self.corrected = frozenset(self._seqs[row].seq_id for row in wrong)
        for row in wrong:
            chosen[row] = again[row]
        return [
            failures.get(row) or SampledToken(seq.seq_id, chosen[row])
            for row, seq in enumerate(self._seqs)
        ]

    def _draw_again(self, rows: list[int]) -> dict[int, int]:
        adjusted, self._adjusted = self._adjusted, None
        if not rows:
            return {}
        assert adjusted is not None, "a row is in doubt whose draw looked at all tokens"
        return draw_in_room(adjusted, {row: self._draws[row] for row in rows})


def _without_memory(seq: Sequence) -> SequenceFailure:
    message = f"out of memory with the draw of token {len(seq.token_ids)} of this request alone"
    return SequenceFailure(seq.seq_id, "engine_failure", message)
