"""The attention kernels against a few lines of torch, once after loading."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK, _LENGTH = 6, 2, 32, 32, 45


def find_attention_differences() -> Iterator[str]:
    """Yield the types in which a decode or a chunk is not what torch makes of it."""
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        query, key, value = (
            torch.randn(_LENGTH, heads, _HEAD_DIM, generator=generator).to(dtype)
            for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
        )
        wanted = _attend(query, key, value)
        for num_new in (1, 11):
            found = _run(query[-num_new:], key, value).float()
            if not torch.allclose(found, wanted[-num_new:], rtol=tolerance, atol=tolerance):
                yield f"attention of {num_new} in {dtype}"


def _run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend the last tokens of one sequence, whose two blocks lie in reverse order."""
    ops, per_word = torch.ops.headrace, 4 // key.itemsize
    blocks = (3, _KV_HEADS)
    key_cache = key.new_zeros(*blocks, _HEAD_DIM // per_word, _BLOCK, per_word)
    value_cache = key.new_zeros(*blocks, _BLOCK // per_word, _HEAD_DIM, per_word)
    positions = torch.arange(_LENGTH)
    slots = (2 - positions // _BLOCK) * _BLOCK + positions % _BLOCK
    ops.write_kv(key_cache, value_cache, key, value, slots)
    bounds = torch.tensor([0, len(query)], dtype=torch.int32)
    lengths = torch.tensor([_LENGTH], dtype=torch.int32)
    table = torch.tensor([[2, 1]], dtype=torch.int32)
    plan = ops.plan_attention(bounds, lengths, table, _BLOCK, _KV_HEADS, _HEADS // _KV_HEADS)
    output: torch.Tensor = ops.paged_attention(
        query, key_cache, value_cache, table, plan, _HEAD_DIM**-0.5, None, None
    )
    return output


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return causal attention ``[length, heads, head_dim]`` in float32."""
    group = _HEADS // _KV_HEADS
    keys, values = (rows.float().repeat_interleave(group, dim=1) for rows in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * _HEAD_DIM**-0.5
    hidden = torch.ones(_LENGTH, _LENGTH, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
