"""A batch under way: what the next one reads of it on the device, and what the host hears later."""

from __future__ import annotations

from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass

import torch

from headrace_worker.attention.base import PackedBatch
from headrace_worker.engine.row_failures import (
    Span,
    drop_what_follows_a_failure,
    find_failures,
    rows_are_finite,
)
from headrace_worker.engine.running import RowResult
from headrace_worker.engine.sample_ahead import SampledAhead
from headrace_worker.engine.schedule import ScheduledSequence
from headrace_worker.engine.sequence import Sequence
from headrace_worker.engine.transfer import HostCopy, to_device


@dataclass(frozen=True, slots=True)
class ExecutedBatch:
    """A step that was waited for: all is known."""

    results: list[RowResult]

    @property
    def corrected(self) -> frozenset[int]:
        """Nobody can have read anything else."""
        return frozenset()

    def collect(self) -> list[RowResult]:
        """Return what became of its rows."""
        return self.results


class LaunchedBatch:
    """A step whose tokens are on the device."""

    def __init__(
        self,
        scheduled: ReadOnlyList[ScheduledSequence],
        hidden: torch.Tensor,  # [num_tokens, hidden]
        logits: torch.Tensor | None,  # [num_rows, vocab] of those that sample; None: nobody does
        sampling: list[Sequence],  # in the order of the rows
    ) -> None:
        self._spans = list(map(Span.of, scheduled))
        self._finite = HostCopy(rows_are_finite(hidden))
        self._sampled = None if logits is None else SampledAhead(logits, sampling)
        self._row_of = {seq.seq_id: row for row, seq in enumerate(sampling)}

    @property
    def corrected(self) -> frozenset[int]:
        """Sequences whose token, once collected, is not the one that ``fill_in`` has read."""
        return self._sampled.corrected if self._sampled else frozenset()

    def fill_in(self, batch: PackedBatch, seqs: ReadOnlyList[Sequence]) -> None:
        """Put this step's tokens where the next batch has pending ones; its rows are decodes.

        ``seqs`` are the next batch's, in its order.
        """
        pending = [
            (index, self._row_of[seq.seq_id])
            for index, seq in enumerate(seqs)
            if seq.num_pending_tokens
        ]
        if not pending:
            return
        assert self._sampled is not None, "tokens are pending that nobody sampled"
        assert pending[-1][0] < batch.num_decodes, "a pending token is the last, and so a decode"
        # A decode is one token, so a sequence's place among them is its token's.
        places = to_device(torch.tensor(pending), batch.input_ids.device)  # [num_pending, 2]
        batch.input_ids[places[:, 0]] = self._sampled.tokens[places[:, 1]]

    def collect(self) -> list[RowResult]:
        """Wait for the step; return what became of its rows."""
        results: list[RowResult] = []
        (is_finite,) = self._finite.wait()
        if not bool(is_finite.all()):
            results += find_failures(self._spans, is_finite)
        if self._sampled:
            results += self._sampled.collect()
        return list(drop_what_follows_a_failure(results))
