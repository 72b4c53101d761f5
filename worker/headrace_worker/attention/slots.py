"""A KV cache addressed by slot, ``block_id * block_size + offset``: one row a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace_worker.attention.base import (
    AttentionBackend,
    KVCacheSpec,
    PackedBatch,
)


@dataclass(frozen=True, slots=True)
class SlotCache:
    """Keys and values of every layer, laid out so that one token's row is contiguous::

    key[layer]    | block 0 (trash) | block 1 | ...        [num_slots, kv_heads, head_dim]
    """

    key: tuple[torch.Tensor, ...]  # one tensor a layer, [num_slots, kv_heads, head_dim]
    value: tuple[torch.Tensor, ...]  # the same shape
    block_size: int  # tokens per block

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store ``[num_tokens, kv_heads, head_dim]`` rows at ``slot_mapping`` of ``layer``."""
        self.key[layer].index_copy_(0, slot_mapping, key)
        self.value[layer].index_copy_(0, slot_mapping, value)


class SlotBackend(AttentionBackend):
    """What the backends over a SlotCache share: everything but ``begin`` and ``attend``."""

    def __init__(self) -> None:
        self._cache: SlotCache | None = None  # None until allocate

    @classmethod
    def supported_block_sizes(cls) -> tuple[int, ...]:
        """Any will do; 16 wastes little."""
        return (16, 32, 64, 128, 256, 8, 4, 2, 1)

    def allocate(self, spec: KVCacheSpec, num_blocks: int) -> None:
        """Reserve the zero-filled cache; raises as ``check_cache`` does."""
        self.check_cache(spec, num_blocks)
        self._cache = _allocate_slots(spec, num_blocks)

    def write_kv(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: PackedBatch
    ) -> None:
        """Store the new keys and values at their slots."""
        self.cache.write(layer, key, value, batch.slot_mapping)

    @property
    def cache(self) -> SlotCache:
        """The cache, once it is allocated."""
        assert self._cache is not None
        return self._cache


def _allocate_slots(spec: KVCacheSpec, num_blocks: int) -> SlotCache:
    shape = (num_blocks * spec.block_size, spec.num_kv_heads, spec.head_dim)

    def layers() -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.zeros(shape, dtype=spec.dtype, device=spec.device) for _ in range(spec.num_layers)
        )

    return SlotCache(key=layers(), value=layers(), block_size=spec.block_size)


def slots_of(block_table: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the slots ``[B, n]`` int64 of ``positions`` ``[B, n]`` of the table's sequences."""
    blocks = block_table.gather(1, positions // block_size).long()
    return blocks * block_size + positions % block_size
