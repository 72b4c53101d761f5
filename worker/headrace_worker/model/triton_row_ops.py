"""The elementwise parts of a layer on CUDA: one Triton kernel each, the write to the cache too."""

from __future__ import annotations

from typing import ClassVar

import torch

from headrace_worker.attention.slots import SlotBackend
from headrace_worker.model.kv_place import KVPlace, RotateThenWrite
from headrace_worker.model.norm import Norm
from headrace_worker.model.rope import Rotation


class TritonRowOps(RotateThenWrite):
    """One pass over the rows each, rounded where the torch path rounds.

    Kernels are imported when they are launched, so that a machine without Triton can import this.
    """

    name: ClassVar[str] = "triton"

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Return the norm of ``[num_tokens, size]`` or ``[num_tokens, heads, head_dim]``."""
        from headrace_worker.kernels_triton.norms import add_norm_rows

        return add_norm_rows(x, None, norm.weight, norm.eps, is_centred=norm.is_centred)

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm
    ) -> torch.Tensor:
        """Add ``delta``, if any, to ``hidden [num_tokens, size]`` in place; return the norm."""
        from headrace_worker.kernels_triton.norms import add_norm_rows

        return add_norm_rows(hidden, delta, norm.weight, norm.eps, is_centred=norm.is_centred)

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """Return ``activation(gate) * up`` of rows ``[gate | up]``, ``[num_tokens, 2 * size]``."""
        from headrace_worker.kernels_triton.gates import gate_rows

        return gate_rows(gate_up, activation)

    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Rotate ``[num_tokens, heads, head_dim]`` in place, and return it."""
        from headrace_worker.kernels_triton.rotary import rotate_rows

        rotate_rows(heads, rotation)
        return heads

    def rotate_and_write(
        self, query_key: torch.Tensor, value: torch.Tensor, rotation: Rotation, place: KVPlace
    ) -> torch.Tensor:
        """Rotate in place and fill the slots in one launch, where the cache is one of slots."""
        if not isinstance(place.backend, SlotBackend):
            return super().rotate_and_write(query_key, value, rotation, place)
        from headrace_worker.kernels_triton.rotary import rotate_and_store

        cache = place.backend.cache
        slots = (cache.key[place.layer], cache.value[place.layer])
        return rotate_and_store(query_key, value, rotation, slots, place.batch.slot_mapping)
