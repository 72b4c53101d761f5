"""The elementwise parts of a layer: torch's own operators, or one kernel each."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from headrace_worker.attention.base import AttentionNeed
from headrace_worker.attention.native import NativeBackend
from headrace_worker.attention.triton import TritonBackend
from headrace_worker.kernels import load_kernels
from headrace_worker.model.activations import ACTIVATIONS
from headrace_worker.model.kv_place import KVPlace, RotateThenWrite
from headrace_worker.model.norm import Norm
from headrace_worker.model.rope import Rotation, rotate
from headrace_worker.model.triton_row_ops import TritonRowOps

_KERNEL_DTYPES = (torch.float32, torch.bfloat16)


class RowOps(Protocol):
    """What a layer does to rows besides products and attention; a row never sees another."""

    name: ClassVar[str]

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Return the norm of ``[num_tokens, size]`` or ``[num_tokens, heads, head_dim]``."""
        ...

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm
    ) -> torch.Tensor:
        """Add ``delta``, if any, to ``hidden [num_tokens, size]`` in place; return the norm."""
        ...

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """Return ``activation(gate) * up`` of rows ``[gate | up]``, ``[num_tokens, 2 * size]``."""
        ...

    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Return ``[num_tokens, heads, head_dim]``, rotated; the argument may be overwritten."""
        ...

    def rotate_and_write(
        self, query_key: torch.Tensor, value: torch.Tensor, rotation: Rotation, place: KVPlace
    ) -> torch.Tensor:
        """Rotate ``[num_tokens, heads + kv_heads, head_dim]``, write keys and values to the cache.

        Returns the rotated query ``[num_tokens, heads, head_dim]``; arguments may be overwritten.
        """
        ...


class TorchRowOps(RotateThenWrite):
    """The reference, which has the bits of transformers."""

    name: ClassVar[str] = "torch"

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Normalize in float32, by several passes over the rows."""
        return norm(x)

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm
    ) -> torch.Tensor:
        """Add, then normalize."""
        if delta is not None:
            hidden += delta
        return norm(hidden)

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """Activate one half, then multiply."""
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate).mul_(up)

    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Rotate a copy."""
        return rotate(heads, rotation)


class KernelRowOps(RotateThenWrite):
    """One pass over the rows each; rounded at the same places, sums of squares in another order."""

    name: ClassVar[str] = "kernels"

    def __init__(self) -> None:
        ops = torch.ops.headrace  # looked up once: a name costs more than a small kernel
        self._norm = ops.rms_norm.default
        self._add_norm = ops.add_rms_norm.default
        self._rotate = ops.rotate.default
        self._rotate_and_write = ops.rotate_and_write.default
        self._gates = {"silu": ops.silu_mul.default, "gelu_pytorch_tanh": ops.gelu_tanh_mul.default}

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Normalize in one pass."""
        normed: torch.Tensor = self._norm(x, norm.weight, norm.eps, norm.is_centred)
        return normed

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm
    ) -> torch.Tensor:
        """Add and normalize while the row is in the cache."""
        if delta is None:
            return self.norm(hidden, norm)
        normed: torch.Tensor = self._add_norm(hidden, delta, norm.weight, norm.eps, norm.is_centred)
        return normed

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """Activate and multiply in one pass."""
        gated: torch.Tensor = self._gates[activation](gate_up)
        return gated

    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Rotate in place."""
        self._rotate(heads, *rotation)
        return heads

    def rotate_and_write(
        self, query_key: torch.Tensor, value: torch.Tensor, rotation: Rotation, place: KVPlace
    ) -> torch.Tensor:
        """Rotate in place and fill the slots in one pass, where the cache is our kernels' own."""
        if not isinstance(place.backend, NativeBackend):
            return super().rotate_and_write(query_key, value, rotation, place)
        caches = place.backend.layer_cache(place.layer)
        self._rotate_and_write(query_key, value, *rotation, *caches, place.batch.slot_mapping)
        return query_key[:, : query_key.shape[1] - value.shape[1]]


TORCH_ROW_OPS = TorchRowOps()


def best_row_ops(dtype: torch.dtype, device: torch.device) -> RowOps:
    """Return the kernels where they can be had for tensors of this kind, else torch's operators."""
    if row_kernel_obstacle(dtype, device) is not None:
        return TORCH_ROW_OPS
    return KernelRowOps() if device.type == "cpu" else TritonRowOps()


def row_kernel_obstacle(dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why there are no kernels for tensors of this kind; ``None`` where there are."""
    if device.type == "cuda":
        return TritonBackend.obstacle(AttentionNeed(device, dtype))
    if device.type != "cpu":
        return f"there are none for {device.type!r}"
    if dtype not in _KERNEL_DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"on a CPU they take float32 and bfloat16, not {name}"
    return load_kernels().missing_reason
