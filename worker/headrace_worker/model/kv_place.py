"""Where a layer's keys and values go, and the two steps that take them there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from headrace_worker.attention.base import AttentionBackend, PackedBatch
from headrace_worker.model.rope import Rotation


@dataclass(frozen=True, slots=True)
class KVPlace:
    """One layer's part of the cache, in one step."""

    layer: int
    batch: PackedBatch
    backend: AttentionBackend


class RotateThenWrite(ABC):
    """What row operations do whose kernels do not know the cache: rotate, then have it written."""

    @abstractmethod
    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Return ``[num_tokens, heads, head_dim]``, rotated; the argument may be overwritten."""

    def rotate_and_write(
        self,
        query_key: torch.Tensor,  # [num_tokens, heads + kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, kv_heads, head_dim]
        rotation: Rotation,
        place: KVPlace,
    ) -> torch.Tensor:
        """Return the rotated query ``[num_tokens, heads, head_dim]``; key and value are written."""
        num_heads = query_key.shape[1] - value.shape[1]
        rotated = self.rotate(query_key, rotation)
        place.backend.write_kv(place.layer, rotated[:, num_heads:], value, place.batch)
        return rotated[:, :num_heads]
