"""Steps of a given shape over scattered blocks, as attention backends get them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from benchmarks.gpu_parts.setup import Share
from headrace_worker.attention import AttentionBackend, PackedBatch


@dataclass(frozen=True, slots=True)
class Layout:
    """Sequences in a step, and where in the cache they lie."""

    shares: tuple[Share, ...]  # single new tokens first, as the engine orders them
    blocks: tuple[tuple[int, ...], ...]  # of each sequence, in order of position
    num_blocks: int  # the trash block counted
    block_size: int  # tokens

    def step(self, device: torch.device) -> PackedBatch:
        """Return the batch of the new tokens."""
        return self._pack([(cached, cached + new) for cached, new in self.shares], device)

    def whole(self, device: torch.device) -> PackedBatch:
        """Return a batch in which every token is new, for the cache to be filled by."""
        return self._pack([(0, cached + new) for cached, new in self.shares], device)

    def _pack(self, ranges: Sequence[tuple[int, int]], device: torch.device) -> PackedBatch:
        lengths = [end - start for start, end in ranges]
        width = max(map(len, self.blocks))
        table = torch.tensor([[*row, *[0] * (width - len(row))] for row in self.blocks])
        positions = torch.cat([torch.arange(start, end) for start, end in ranges])
        rows = torch.repeat_interleave(torch.tensor(lengths))
        slots = table[rows, positions // self.block_size] * self.block_size
        bounds = torch.tensor([0, *accumulate(lengths)])
        return PackedBatch(
            input_ids=torch.zeros_like(positions).to(device),
            positions=positions.to(device),
            slot_mapping=(slots + positions % self.block_size).to(device),
            cu_seqlens_q=bounds.int().to(device),
            seq_lens=torch.tensor([end for _, end in ranges]).int().to(device),
            block_table=table.int().to(device),
            logit_rows=(bounds[1:] - 1).to(device),
            max_seqlen_q=max(lengths),
            max_seqlen_k=max(end for _, end in ranges),
            num_decodes=sum(length == 1 for length in lengths),
        )


def lay_out(shares: Sequence[Share], block_size: int) -> Layout:
    """Scatter the blocks that the shares need all over a cache that is just large enough."""
    counts = [-(-(cached + new) // block_size) for cached, new in shares]
    ids = list(range(1, sum(counts) + 1))
    random.Random(0).shuffle(ids)
    ends = list(accumulate(counts))
    blocks = tuple(tuple(ids[end - count : end]) for count, end in zip(counts, ends, strict=True))
    return Layout(tuple(shares), blocks, len(ids) + 1, block_size)


def fill(
    backend: AttentionBackend,
    layout: Layout,
    num_layers: int,
    key_value: tuple[torch.Tensor, torch.Tensor],  # each [all tokens, kv_heads, head_dim]
) -> None:
    """Write the same keys and values to every layer."""
    batch = layout.whole(key_value[0].device)
    backend.begin(batch)
    for layer in range(num_layers):
        backend.write_kv(layer, *key_value, batch)
