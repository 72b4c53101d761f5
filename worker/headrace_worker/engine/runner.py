"""The model runner: packed batch → one forward → logits of the rows that count → tokens, scores."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ReadOnlyList
from typing import Protocol, TypeVar

import torch

from headrace_worker.attention.base import AttentionBackend, PackedBatch
from headrace_worker.engine.batch import build_batch
from headrace_worker.engine.errors import StepTooLarge
from headrace_worker.engine.launched import ExecutedBatch, LaunchedBatch
from headrace_worker.engine.prompt_scores import score_prompts
from headrace_worker.engine.row_failures import (
    Span,
    drop_what_follows_a_failure,
    find_failures,
    rows_are_finite,
)
from headrace_worker.engine.running import RowResult
from headrace_worker.engine.sampler import sample
from headrace_worker.engine.schedule import ScheduledSequence

T = TypeVar("T")


class Decoder(Protocol):
    """What the runner needs of a model."""

    def forward(self, batch: PackedBatch, backend: AttentionBackend) -> torch.Tensor:
        """Return the hidden state of every new token, ``[num_tokens, hidden]``."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[num_rows, vocab]``, float32 or narrower, for ``[num_rows, hidden]``."""
        ...


class ModelRunner:
    """Runs a decoder over an allocated KV cache."""

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        *,
        block_size: int,
        device: torch.device,
        sampled_vocab_size: int | None = None,
    ) -> None:
        self.decoder = decoder
        self.backend = backend
        self._block_size = block_size  # tokens
        self._device = device
        self._sampled_vocab_size = sampled_vocab_size  # ids from here on are padding
        self._last: LaunchedBatch | None = None  # whose tokens the next batch may have to read

    def execute(self, scheduled: ReadOnlyList[ScheduledSequence]) -> list[RowResult]:
        """Compute one step; return scores of prompts, then how each share that samples went on.

        Raises StepTooLarge when the device has no memory for it.
        """
        return self._with_memory(self._execute, scheduled)

    def launch(self, scheduled: ReadOnlyList[ScheduledSequence]) -> LaunchedBatch | ExecutedBatch:
        """Start one step and do not wait for it, unless it is one that the next has to wait for.

        Raises StepTooLarge when the device has no memory for it.
        """
        if any(share.must_land_first for share in scheduled):
            return ExecutedBatch(self.execute(scheduled))
        return self._with_memory(self._launch, scheduled)

    def _with_memory(
        self,
        run: Callable[[ReadOnlyList[ScheduledSequence]], T],
        scheduled: ReadOnlyList[ScheduledSequence],
    ) -> T:
        try:
            return run(scheduled)
        except torch.OutOfMemoryError as error:
            message = str(error)
        # Out here nothing of the step is alive: while it is handled, an error keeps its frames, and
        # they their tensors.
        self._last = None  # it lands before another step is tried
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise StepTooLarge(message)

    @torch.inference_mode()
    def _execute(self, scheduled: ReadOnlyList[ScheduledSequence]) -> list[RowResult]:
        batch = self._build_batch(scheduled)
        hidden = self.decoder.forward(batch, self.backend)  # [num_tokens, hidden]
        results: list[RowResult] = []
        is_finite = rows_are_finite(hidden)
        if not bool(is_finite.all()):
            results += find_failures(list(map(Span.of, scheduled)), is_finite)
        results += score_prompts(scheduled, hidden, self._wide_logits)
        if sampling := [share.seq for share in scheduled if share.samples]:
            results += sample(self._compute_logits(hidden[batch.logit_rows]), sampling)
        return list(drop_what_follows_a_failure(results))

    @torch.inference_mode()
    def _launch(self, scheduled: ReadOnlyList[ScheduledSequence]) -> LaunchedBatch:
        batch = self._build_batch(scheduled)
        hidden = self.decoder.forward(batch, self.backend)  # [num_tokens, hidden]
        sampling = [share.seq for share in scheduled if share.samples]
        logits = self._wide_logits(hidden[batch.logit_rows]) if sampling else None
        self._last = LaunchedBatch(scheduled, hidden, logits, sampling)
        return self._last

    def _build_batch(self, scheduled: ReadOnlyList[ScheduledSequence]) -> PackedBatch:
        batch = build_batch(scheduled, self._block_size, self._device)
        if self._last is not None:
            self._last.fill_in(batch, [share.seq for share in scheduled])
        return batch

    def _compute_logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self.decoder.logits(rows)  # [num_rows, vocab]
        return logits[:, : self._sampled_vocab_size]

    def _wide_logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self._compute_logits(rows).float()
