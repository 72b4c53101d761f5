"""Decode steps as recorded graphs: what Python says of a layer is said once, and then replayed.

A graph is bound to its tensors and their sizes. So there is one for each of some batch sizes, all
over the same static inputs; a batch is copied into them and padded to the next size::

    batch of 5     | d0 | d1 | d2 | d3 | d4 |
    graph of 8     | d0 | d1 | d2 | d3 | d4 | trash | trash | trash |

A row of padding is a sequence of one token in the trash block: it writes and reads nothing that is
anybody's (a slot of -1 would be the last real one to some kernels). A step with a chunk has too
many shapes, and enough work, so it runs without.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass

import torch

from headrace_worker.attention.base import AttentionBackend, PackedBatch
from headrace_worker.engine.block_pool import TRASH_BLOCK
from headrace_worker.engine.runner import Decoder

_LARGEST = 512  # rows; beyond that a step takes so long that Python keeps up
_EVERY = 8  # rows, from the first of that size on

Replay = Callable[[], torch.Tensor]  # computes again what was captured; the result is overwritten
Capture = Callable[[Callable[[], torch.Tensor]], Replay]


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes to record, in rows, ascending: 1, 2, 4, 8, 16, 24 and so on."""
    largest = min(max_num_seqs, _LARGEST)
    small = [size for size in (1, 2, 4) if size < largest]
    return (*small, *range(_EVERY, largest, _EVERY), largest)


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The largest batch that a graph can hold."""

    sizes: tuple[int, ...]  # rows, ascending
    block_size: int  # tokens
    max_model_len: int  # tokens, prompt and output together

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)


class GraphedDecoder:
    """A decoder that replays its decode steps; the runner does not know.

    What ``forward`` returns is overwritten by the next one. On a device that is in order: whoever
    reads it was queued before.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        limits: GraphLimits,
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._backend = backend
        self._sizes = limits.sizes
        self._static = _static_batch(limits, device)
        self._max_seqlen_k = limits.max_model_len
        self._replays: dict[int, Replay] = {}  # by size, in rows

    @torch.inference_mode()
    def capture(self, capture: Capture, sizes: ReadOnlyList[int] | None = None) -> None:
        """Record these sizes, all unless told, the largest first: the others fit into its memory.

        The KV cache must be where it will be: a graph remembers addresses.
        """
        self._pad(0, self._sizes[-1])
        for size in sorted(self._sizes if sizes is None else sizes, reverse=True):
            self._replays[size] = capture(self._forward_of(size))

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, backend: AttentionBackend) -> torch.Tensor:
        """Return the hidden state of every new token, ``[num_tokens, hidden]``."""
        size = self.size_for(batch)
        if size is None:
            return self._decoder.forward(batch, backend)
        self._copy(batch)
        self._pad(batch.num_seqs, size)
        return self._replays[size]()[: batch.num_seqs]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[num_rows, vocab]``, float32 or narrower, for ``[num_rows, hidden]``."""
        return self._decoder.logits(hidden)

    def size_for(self, batch: PackedBatch) -> int | None:
        """Return the rows of the graph that a batch is replayed by; None: it runs without."""
        index = bisect_left(self._sizes, batch.num_seqs)
        if batch.num_decodes < batch.num_seqs or index == len(self._sizes):
            return None
        return self._sizes[index]

    def _forward_of(self, size: int) -> Callable[[], torch.Tensor]:
        static = self._static
        batch = PackedBatch(
            input_ids=static.input_ids[:size],
            positions=static.positions[:size],
            slot_mapping=static.slot_mapping[:size],
            cu_seqlens_q=static.cu_seqlens_q[: size + 1],
            seq_lens=static.seq_lens[:size],
            block_table=static.block_table[:size],
            logit_rows=static.logit_rows[:size],
            max_seqlen_q=1,
            max_seqlen_k=self._max_seqlen_k,
            num_decodes=size,
        )
        return lambda: self._decoder.forward(batch, self._backend)

    def _copy(self, batch: PackedBatch) -> None:
        """Put a batch into the static inputs; what a row of its table had beyond is not read."""
        static, count = self._static, batch.num_seqs
        static.input_ids[:count].copy_(batch.input_ids)
        static.positions[:count].copy_(batch.positions)
        static.slot_mapping[:count].copy_(batch.slot_mapping)
        static.seq_lens[:count].copy_(batch.seq_lens)
        static.block_table[:count, : batch.block_table.shape[1]].copy_(batch.block_table)

    def _pad(self, start: int, end: int) -> None:
        """Make rows [start, end) sequences of one token, the first of the trash block."""
        static = self._static
        if start == end:
            return
        for tensor in (static.input_ids, static.positions):
            tensor[start:end] = 0
        static.slot_mapping[start:end] = static.trash_slot
        static.seq_lens[start:end] = 1
        static.block_table[start:end] = TRASH_BLOCK


@dataclass(frozen=True, slots=True)
class _StaticBatch:
    """Inputs at fixed addresses, as many rows as the largest graph."""

    input_ids: torch.Tensor  # [num_rows] int64
    positions: torch.Tensor  # [num_rows] int64
    slot_mapping: torch.Tensor  # [num_rows] int64
    cu_seqlens_q: torch.Tensor  # [num_rows + 1] int32, always 0, 1, 2 …
    seq_lens: torch.Tensor  # [num_rows] int32
    block_table: torch.Tensor  # [num_rows, table_width] int32
    logit_rows: torch.Tensor  # [num_rows] int64, always 0, 1, 2 …
    trash_slot: int  # the first of the trash block


def _static_batch(limits: GraphLimits, device: torch.device) -> _StaticBatch:
    num_rows = limits.sizes[-1]

    def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return _StaticBatch(
        input_ids=zeros(torch.int64, num_rows),
        positions=zeros(torch.int64, num_rows),
        slot_mapping=zeros(torch.int64, num_rows),
        cu_seqlens_q=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        seq_lens=zeros(torch.int32, num_rows),
        block_table=zeros(torch.int32, num_rows, limits.table_width),
        logit_rows=torch.arange(num_rows, device=device),
        trash_slot=TRASH_BLOCK * limits.block_size,
    )
