"""The model runner: packed batch → one forward → logits of the rows that count → tokens, scores."""

from __future__ import annotations

from collections.abc import Iterator
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
        self.decoder = decoder
        self.backend = backend
        self._block_size = block_size  # tokens
        self._device = device
        self._sampled_vocab_size = sampled_vocab_size  # ids from here on are padding

    @torch.inference_mode()
    def execute(self, scheduled: ReadOnlyList[ScheduledSequence]) -> list[RowResult]:
        """Compute one step; return scores of prompts, then how each share that samples went on."""
        batch = build_batch(scheduled, self._block_size, self._device)
        hidden = self.decoder.forward(batch, self.backend)  # [num_tokens, hidden]
        results: list[RowResult] = [*_find_failures(scheduled, hidden)]
        results += score_prompts(scheduled, hidden, self._compute_logits)
        if sampling := [share.seq for share in scheduled if share.samples]:
            results += sample(self._compute_logits(hidden[batch.logit_rows]), sampling)
        return list(_drop_what_follows_a_failure(results))

    def _compute_logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self.decoder.logits(rows)  # [num_rows, vocab]
        return logits[:, : self._sampled_vocab_size]


def _find_failures(
    scheduled: ReadOnlyList[ScheduledSequence], hidden: torch.Tensor
) -> Iterator[SequenceFailure]:
    """Yield the sequences with a token whose hidden state ``[num_tokens, hidden]`` is not finite.

    A chunk need not be sampled for its keys and values to be read by others, through the prefix
    cache. As each token attends to itself, they are finite wherever the hidden state is.
    """
    row_is_finite = torch.isfinite(hidden.sum(-1, dtype=torch.float32))
    if bool(row_is_finite.all()):
        return
    is_finite: list[bool] = row_is_finite.tolist()
    end = 0
    for share in scheduled:
        start, end = end, end + share.num_new_tokens
        if False in is_finite[start:end]:
            place = share.seq.num_computed_tokens + is_finite.index(False, start) - start
            message = f"the hidden state of token {place} is not finite"
            yield SequenceFailure(share.seq.seq_id, "engine_failure", message)


def _drop_what_follows_a_failure(results: list[RowResult]) -> Iterator[RowResult]:
    """Each sequence fails once, and nothing is told of it afterwards."""
    failed = set[int]()
    for result in results:
        if result.seq_id not in failed:
            yield result
        if isinstance(result, SequenceFailure):
            failed.add(result.seq_id)
