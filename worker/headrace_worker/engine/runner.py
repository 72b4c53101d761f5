"""The model runner: packed batch → one forward → logits of the rows that count → tokens, scores."""

from __future__ import annotations

from collections.abc import Sequence as ReadOnlyList
from typing import Protocol

import torch

from headrace_worker.attention.base import AttentionBackend, PackedBatch
from headrace_worker.engine.batch import build_batch
from headrace_worker.engine.engine import RowResult
from headrace_worker.engine.messages import SequenceFailure
from headrace_worker.engine.prompt_scores import score_prompts
from headrace_worker.engine.sampler import sample
from headrace_worker.engine.scheduler import ScheduledSequence


class Decoder(Protocol):
    """What the runner needs of a model."""

    def forward(self, batch: PackedBatch, backend: AttentionBackend) -> torch.Tensor:
        """Return the hidden state of every new token, ``[num_tokens, hidden]``."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[num_rows, vocab]`` float32 for hidden states ``[num_rows, hidden]``."""
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
        self._decoder = decoder
        self._backend = backend
        self._block_size = block_size  # tokens
        self._device = device
        self._sampled_vocab_size = sampled_vocab_size  # ids from here on are padding

    @torch.inference_mode()
    def execute(self, scheduled: ReadOnlyList[ScheduledSequence]) -> list[RowResult]:
        """Compute one step; return scores of prompts, then how each share that samples went on."""
        batch = build_batch(scheduled, self._block_size, self._device)
        hidden = self._decoder.forward(batch, self._backend)  # [num_tokens, hidden]
        results: list[RowResult] = [*score_prompts(scheduled, hidden, self._compute_logits)]
        failed = {result.seq_id for result in results if isinstance(result, SequenceFailure)}
        if sampling := [share.seq for share in scheduled if share.samples]:
            sampled = sample(self._compute_logits(hidden[batch.logit_rows]), sampling)
            results += (result for result in sampled if result.seq_id not in failed)
        return results

    def _compute_logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self._decoder.logits(rows)  # [num_rows, vocab]
        return logits[:, : self._sampled_vocab_size]
