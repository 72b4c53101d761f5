"""Attention with soft-capped scores (Gemma 2), which torch's fused SDPA cannot compute."""

from __future__ import annotations

import torch

_MAX_SCORES = 2**22  # in memory at once, 16 MiB; a single row may have more


def attend_capped(
    query: torch.Tensor,  # [n, heads, head_dim], new tokens of one sequence
    key: torch.Tensor,  # [num_keys, kv_heads, head_dim]
    value: torch.Tensor,  # [num_keys, kv_heads, head_dim]
    mask: torch.Tensor,  # [n, num_keys] float32, 0 or -inf, added to the capped scores
    *,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    """Return ``[n, heads, head_dim]`` in the query's dtype, computed in float32.

    One sequence a call: every product and every tanh then has a shape, and so bits, that no other
    sequence can change.
    """
    num_kv_heads, num_heads = key.shape[1], query.shape[1]
    keys = key.float().permute(1, 2, 0)  # [kv_heads, head_dim, num_keys]
    values = value.float().transpose(0, 1)  # [kv_heads, num_keys, head_dim]
    num_rows = max(1, _MAX_SCORES // (num_heads * key.shape[0]))
    parts = []
    for rows, row_mask in zip(
        torch.split(query, num_rows), torch.split(mask, num_rows), strict=True
    ):
        grouped = rows.float().view(len(rows), num_kv_heads, num_heads // num_kv_heads, -1)
        by_head = grouped.permute(1, 2, 0, 3)  # [kv_heads, group, n, head_dim]
        scores = by_head.flatten(1, 2) @ keys  # [kv_heads, group * n, num_keys]
        scores = scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap)
        weights = (scores.view(*by_head.shape[:3], -1) + row_mask).softmax(dim=-1)
        output = (weights.flatten(1, 2) @ values).view(by_head.shape)
        parts.append(output.permute(2, 0, 1, 3).reshape(rows.shape))
    return torch.cat(parts).to(query.dtype)
