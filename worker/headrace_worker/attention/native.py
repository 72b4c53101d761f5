"""Attention on the CPU by our own C++ kernels: one call a layer, straight from the paged cache.

A row's bits follow from its own query, keys and values alone: not from who shares the batch, where
its blocks lie, how its prompt is cut into chunks, or how many threads there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from headrace_worker.attention.base import (
    AttentionBackend,
    AttentionNeed,
    KVCacheSpec,
    PackedBatch,
)
from headrace_worker.kernels import load_kernels

_DTYPES = (torch.float32, torch.bfloat16)
_MAX_HEAD_DIM = 256
_SLACK = 16  # words beyond the values that a whole vector may reach


@dataclass(frozen=True, slots=True)
class _Cache:
    """Keys and values of every layer, in the order that ``kernels/kv_layout.h`` draws."""

    key: tuple[torch.Tensor, ...]  # [num_blocks, kv_heads, head_dim / W, block_size, W]
    value: tuple[torch.Tensor, ...]  # [num_blocks, kv_heads, block_size / W, head_dim, W]
    num_kv_heads: int
    block_size: int  # tokens


class NativeBackend(AttentionBackend):
    """Hands each layer to ``torch.ops.headrace``; a step's tasks are planned once.

    Sequences whose block tables begin alike go over the keys that they share together.
    """

    name: ClassVar[str] = "native"

    def __init__(self) -> None:
        self._cache: _Cache | None = None  # None until allocate
        self._plans: dict[int, torch.Tensor] = {}  # of this step, by query heads per KV head

    @classmethod
    def obstacle(cls, need: AttentionNeed) -> str | None:
        """Say what is in the way: the kernels, the dtype or the head size."""
        if need.dtype is not None and need.dtype not in _DTYPES:
            return f"it computes in float32 and bfloat16, not in {need.dtype}"
        if need.head_dim is not None and not _is_head_dim(need.head_dim):
            return f"it takes even head sizes up to {_MAX_HEAD_DIM}, not {need.head_dim}"
        reason = load_kernels().missing_reason
        return None if reason is None else f"the C++ kernels are missing: {reason}"

    @classmethod
    def supported_block_sizes(cls) -> tuple[int, ...]:
        """Whole vectors of keys are read in place; smaller blocks are gathered first."""
        return (32, 16, 64, 128, 256, 8, 4, 2, 1)

    def allocate(self, spec: KVCacheSpec, num_blocks: int) -> None:
        """Reserve the zero-filled cache; raises as ``check_cache`` does."""
        self.check_cache(spec, num_blocks)
        per_word = 4 // spec.dtype.itemsize
        value_rows = -(-spec.block_size // per_word)
        blocks = (num_blocks, spec.num_kv_heads)
        key_shape = (*blocks, spec.head_dim // per_word, spec.block_size, per_word)
        value_shape = (*blocks, value_rows, spec.head_dim, per_word)
        self._cache = _Cache(
            key=tuple(_zeros(key_shape, spec.dtype) for _ in range(spec.num_layers)),
            value=tuple(_zeros(value_shape, spec.dtype) for _ in range(spec.num_layers)),
            num_kv_heads=spec.num_kv_heads,
            block_size=spec.block_size,
        )

    def begin(self, batch: PackedBatch) -> None:
        """Forget the plans of the last step."""
        self._plans = {}

    def write_kv(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: PackedBatch
    ) -> None:
        """Store the new keys and values at their slots."""
        caches = self.layer_cache(layer)
        torch.ops.headrace.write_kv(*caches, key, value, batch.slot_mapping)

    def layer_cache(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the key and value cache of ``layer``, for a kernel that fills them itself."""
        cache = self._allocated
        return cache.key[layer], cache.value[layer]

    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, heads, head_dim]
        layer: int,
        batch: PackedBatch,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Return the attention output ``[num_tokens, heads, head_dim]`` of each new token."""
        cache = self._allocated
        output: torch.Tensor = torch.ops.headrace.paged_attention(
            query,
            cache.key[layer],
            cache.value[layer],
            batch.block_table,
            self._plan(query.shape[1] // cache.num_kv_heads, batch),
            scale,
            window,
            soft_cap,
        )
        return output

    @property
    def _allocated(self) -> _Cache:
        assert self._cache is not None
        return self._cache

    def _plan(self, heads_per_kv_head: int, batch: PackedBatch) -> torch.Tensor:
        if heads_per_kv_head not in self._plans:
            cache = self._allocated
            self._plans[heads_per_kv_head] = torch.ops.headrace.plan_attention(
                batch.cu_seqlens_q,
                batch.seq_lens,
                batch.block_table,
                cache.block_size,
                cache.num_kv_heads,
                heads_per_kv_head,
            )
        return self._plans[heads_per_kv_head]


def _is_head_dim(head_dim: int) -> bool:
    return head_dim % 2 == 0 and 0 < head_dim <= _MAX_HEAD_DIM


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = torch.Size(shape).numel()
    slack = _SLACK * 4 // dtype.itemsize
    return torch.zeros(size + slack, dtype=dtype)[:size].view(shape)
