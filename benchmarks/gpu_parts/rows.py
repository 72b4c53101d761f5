"""The elementwise Triton kernels on the device, against torch's own operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_parts.models import SMALL, dtype_of, shape_of
from benchmarks.gpu_parts.packed import lay_out
from benchmarks.gpu_parts.setup import Setup
from headrace_worker.attention import KVCacheSpec
from headrace_worker.attention.triton import TritonBackend
from headrace_worker.model.kv_place import KVPlace
from headrace_worker.model.norm import Norm
from headrace_worker.model.rope import Rotation
from headrace_worker.model.row_ops import TORCH_ROW_OPS, RowOps
from headrace_worker.model.triton_row_ops import TritonRowOps

_NUM_TOKENS, _NUM_TINY_TOKENS = 300, 5
_TOLERANCE = 2e-2  # relative: two roundings to bfloat16, one here and one there
Operation = Callable[[RowOps], torch.Tensor]


def rows(setup: Setup) -> dict[str, Any]:
    """Return how far each operation is from torch's."""
    device, dtype = torch.device(setup.device), dtype_of(setup)
    if device.type == "cpu":
        dtype = torch.float16  # the interpreter's bfloat16 cuts off instead of rounding
    operations = _operations(setup, device, dtype)
    found = {name: _error(operation) for name, operation in operations.items()}
    return {
        "operations": [
            {"operation": name, "largest_error": error, "is_ok": error <= _TOLERANCE}
            for name, error in found.items()
        ]
    }


def _error(operation: Operation) -> float:
    found, wanted = operation(TritonRowOps()).float(), operation(TORCH_ROW_OPS).float()
    return float(((found - wanted).abs() / (1 + wanted.abs())).max())


def _operations(setup: Setup, device: torch.device, dtype: torch.dtype) -> dict[str, Operation]:
    """Return what is compared; each draws its input anew, since some overwrite it."""
    shape = shape_of(setup, SMALL)
    hidden, inner, head_dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    num_tokens = _NUM_TINY_TOKENS if setup.is_tiny else _NUM_TOKENS

    def draw(*size: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(size, generator=generator, device=device).to(dtype)

    norm = Norm(draw(hidden, seed=1), 1e-6, is_centred=False)
    head_norm = Norm(draw(head_dim, seed=1), 1e-6, is_centred=False)
    angles = draw(num_tokens, 1, head_dim // 2, seed=2).float()
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    rotation = (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    fused = (num_tokens, heads + 2 * kv_heads, head_dim)
    return {
        "norm": lambda ops: ops.norm(draw(num_tokens, hidden), norm),
        "norm of heads": lambda ops: ops.norm(draw(*fused)[:, :heads], head_norm),
        "add and norm": lambda ops: ops.add_norm(
            draw(num_tokens, hidden), draw(num_tokens, hidden, seed=3), norm
        ),
        "silu and multiply": lambda ops: ops.gate(draw(num_tokens, 2 * inner), "silu"),
        "rotate": lambda ops: ops.rotate(draw(*fused)[:, :heads], rotation),
        "rotate and write": lambda ops: _rotate_and_write(ops, draw(*fused), rotation, kv_heads),
    }


def _rotate_and_write(
    ops: RowOps, fused: torch.Tensor, rotation: Rotation, kv_heads: int
) -> torch.Tensor:
    """Return the query, and what the cache holds afterwards."""
    num_tokens, num_heads, head_dim = fused.shape
    backend, layout = TritonBackend(), lay_out([(0, num_tokens)], 16)
    spec = KVCacheSpec(1, kv_heads, head_dim, fused.dtype, fused.device, layout.block_size)
    backend.allocate(spec, layout.num_blocks)
    place = KVPlace(0, layout.step(fused.device), backend)
    split = num_heads - kv_heads
    query = ops.rotate_and_write(fused[:, :split], fused[:, split:], rotation, place)
    cache = backend.cache
    return torch.cat([part.flatten() for part in (query, cache.key[0], cache.value[0])])
