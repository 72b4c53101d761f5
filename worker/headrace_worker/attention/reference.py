"""The oracle of all backends: dense attention under an explicit block-diagonal causal mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from headrace_worker.attention.base import PackedBatch
from headrace_worker.attention.slots import SlotBackend, slots_of


@dataclass(frozen=True, slots=True)
class _DensePlan:
    """One step's keys, laid end to end sequence by sequence, and who may see which."""

    key_slots: torch.Tensor  # [num_keys] int64, cache slot of each key, num_keys = sum of seq_lens
    age: torch.Tensor  # [num_tokens, num_keys] int64, query position less key position
    same_sequence: torch.Tensor  # [num_tokens, num_keys] bool, the block diagonal
    ranges: tuple[tuple[int, int, int, int], ...]  # per sequence: tokens [q0, q1), keys [k0, k1)

    def mask(self, window: int | None) -> torch.Tensor:
        """Return ``[num_tokens, num_keys]``, true where the token attends to the key."""
        visible = self.same_sequence & (self.age >= 0)
        return visible if window is None else visible & (self.age < window)


class ReferenceBackend(SlotBackend):
    """Every score of every token against every key in float32: slow, and easy to believe."""

    name: ClassVar[str] = "reference"

    def __init__(self) -> None:
        super().__init__()
        self._plan: _DensePlan | None = None

    def begin(self, batch: PackedBatch) -> None:
        """Build the block-diagonal mask that the layers share."""
        self._plan = _plan(batch, self.cache.block_size)

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
        plan = self._plan
        num_groups = query.shape[1] // self.cache.key[layer].shape[1]
        key, value = (  # [num_keys, heads, head_dim]
            rows[layer][plan.key_slots].float().repeat_interleave(num_groups, dim=1)
            for rows in (self.cache.key, self.cache.value)
        )
        scores = torch.einsum("thd,khd->htk", query.float(), key) * scale
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        weights = scores.masked_fill(~plan.mask(window), float("-inf")).softmax(dim=-1)
        output = torch.empty_like(query, dtype=torch.float32)
        # Zero times NaN is NaN: a product over all keys would carry one sequence's NaN to others.
        for q0, q1, k0, k1 in plan.ranges:
            output[q0:q1] = torch.einsum("htk,khd->thd", weights[:, q0:q1, k0:k1], value[k0:k1])
        return output.to(query.dtype)


def _plan(batch: PackedBatch, block_size: int) -> _DensePlan:
    device = batch.input_ids.device
    bounds_q = batch.cu_seqlens_q.tolist()
    seq_lens = batch.seq_lens.tolist()
    slots, key_positions, ranges = [], [], []
    k0 = 0
    for index, seq_len in enumerate(seq_lens):
        positions = torch.arange(seq_len, device=device)
        slots.append(slots_of(batch.block_table[index, None], positions[None], block_size)[0])
        key_positions.append(positions)
        ranges.append((bounds_q[index], bounds_q[index + 1], k0, k0 + seq_len))
        k0 += seq_len
    same_sequence = torch.zeros(batch.num_tokens, k0, dtype=torch.bool, device=device)
    for q0, q1, start, end in ranges:
        same_sequence[q0:q1, start:end] = True
    return _DensePlan(
        key_slots=torch.cat(slots),
        age=batch.positions[:, None] - torch.cat(key_positions)[None, :],
        same_sequence=same_sequence,
        ranges=tuple(ranges),
    )
