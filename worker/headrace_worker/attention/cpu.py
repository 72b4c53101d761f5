"""Attention on the CPU through torch's fused SDPA: decodes in padded groups, chunks one by one.

A sequence's output does not depend on who shares the batch. A chunk is computed alone. A decode is
computed with the decodes of its length class, padded to a length that follows from its own length
only; the rows of such a group never mix, and padding repeats the sequence's own first key under a
mask, so no foreign key (trash block, stale tail of a block, a neighbour's NaN) is ever read.
Soft-capped scores, which SDPA cannot compute, are computed sequence by sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from headrace_worker.attention.base import PackedBatch
from headrace_worker.attention.capped import attend_capped
from headrace_worker.attention.plan import ChunkPlan, DecodePlan, StepPlan, plan_step
from headrace_worker.attention.slots import SlotBackend


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's keys and values, and what a call to attend fixes."""

    key: torch.Tensor  # [num_slots, kv_heads, head_dim]
    value: torch.Tensor  # [num_slots, kv_heads, head_dim]
    scale: float  # multiplies the scores
    window: int | None  # sliding window in tokens, own token counted
    soft_cap: float | None  # bounds the scores; None: they are left as they are


class CpuBackend(SlotBackend):
    """Gathers keys through the block table once a layer and leaves the arithmetic to torch."""

    name: ClassVar[str] = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self._plan: StepPlan | None = None

    def begin(self, batch: PackedBatch) -> None:
        """Look up every slot and group the decodes, once for all layers."""
        self._plan = plan_step(batch, self.cache.block_size)

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
        assert self._plan is not None
        rows = _Layer(self.cache.key[layer], self.cache.value[layer], scale, window, soft_cap)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in self._plan.decodes:
            output.index_copy_(0, group.rows, _attend_decodes(query[group.rows], rows, group))
        for chunk in self._plan.chunks:
            output[chunk.start : chunk.end] = _attend_chunk(
                query[chunk.start : chunk.end], rows, chunk
            )
        return output


def _attend_decodes(query: torch.Tensor, layer: _Layer, group: DecodePlan) -> torch.Tensor:
    """Attend ``[B, heads, head_dim]`` single tokens; heads of one KV head become its query rows."""
    if layer.soft_cap is not None:
        return _attend_decodes_capped(query, layer, group, layer.soft_cap)
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads = layer.key.shape[1]
    shape = (num_seqs, group.padded_len, num_kv_heads, head_dim)
    key, value = (
        rows.index_select(0, group.key_slots).view(shape).transpose(1, 2)
        for rows in (layer.key, layer.value)
    )
    output = scaled_dot_product_attention(
        query.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim),
        key,  # [B, kv_heads, padded_len, head_dim]
        value,
        attn_mask=group.mask(layer.window, query.dtype),
        scale=layer.scale,
    )
    return output.reshape(query.shape)


def _attend_decodes_capped(
    query: torch.Tensor, layer: _Layer, group: DecodePlan, soft_cap: float
) -> torch.Tensor:
    masks = group.mask(layer.window, torch.float32)[:, :, 0]  # [B, 1, padded_len]
    slots = group.key_slots.view(-1, group.padded_len)
    outputs = [
        attend_capped(
            query[seq : seq + 1],
            layer.key.index_select(0, slots[seq]),
            layer.value.index_select(0, slots[seq]),
            masks[seq],
            scale=layer.scale,
            soft_cap=soft_cap,
        )
        for seq in range(len(query))
    ]
    return torch.cat(outputs)


def _attend_chunk(query: torch.Tensor, layer: _Layer, chunk: ChunkPlan) -> torch.Tensor:
    """Attend one sequence's ``[n, heads, head_dim]`` new tokens to all its keys."""
    key, value = (rows.index_select(0, chunk.key_slots) for rows in (layer.key, layer.value))
    if layer.soft_cap is not None:
        mask = chunk.explicit_mask(layer.window, torch.float32)
        return attend_capped(query, key, value, mask, scale=layer.scale, soft_cap=layer.soft_cap)
    return _attend_chunk_fused(query, key, value, layer, chunk)


def _attend_chunk_fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: _Layer, chunk: ChunkPlan
) -> torch.Tensor:
    mask = chunk.mask(layer.window, query.dtype)
    output = scaled_dot_product_attention(
        query.transpose(0, 1)[None],  # [1, heads, n, head_dim]
        key.transpose(0, 1)[None],  # [1, kv_heads, seq_len, head_dim]
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=layer.scale,
        enable_gqa=True,
    )
    return output[0].transpose(0, 1)
