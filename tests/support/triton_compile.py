"""Compile kernels for GPUs that are not here: ``python -m support.triton_compile 80 attention``.

Prints, as JSON, the shared memory in bytes that each kernel takes. Triton's compiler and NVIDIA's
assembler come with Triton's wheel, so neither GPU nor driver is needed. ``TRITON_INTERPRET`` must
be ``0`` or absent.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from headrace_worker.kernels_triton import gates, norms, rotary
from headrace_worker.kernels_triton.paged_attention import attend_step, merge_parts
from headrace_worker.kernels_triton.shape import AttentionShape

SHAPES = {
    "llama": AttentionShape(4, 8, 128, 16, None, is_capped=False, dtype=torch.bfloat16),
    "gemma": AttentionShape(2, 4, 256, 64, 512, is_capped=True, dtype=torch.float16),
    "smollm": AttentionShape(3, 3, 64, 256, None, is_capped=False, dtype=torch.bfloat16),
}


class Target:
    """A driver that names a GPU, and has none."""

    def __init__(self, capability: int) -> None:
        self.capability = capability  # 80, 90, ...

    def get_current_target(self) -> GPUTarget:
        """Name the GPU that is compiled for."""
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Number it."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Nothing is ever launched on it."""
        return 0


def main(capability: int, *names: str) -> dict[str, int]:
    """Return the shared memory of each kernel in bytes; raises what the compiler raises."""
    driver.set_active(Target(capability))
    return {
        name: _compile_rows() if name == "rows" else _compile_attention(SHAPES[name])
        for name in names
    }


def _compile_attention(shape: AttentionShape) -> int:
    values = torch.empty(64, dtype=shape.dtype)
    results = torch.empty(64)
    table = torch.empty(64, dtype=torch.int32)
    tables = (table,) * 6  # block table, prefix sums, lengths, and three of work items
    numbers = (5, 3, 9, 4096, 128, 0.5, 1.0)  # sequences, parts, three strides, two factors
    steps: list[Any] = [
        attend_step.warmup(
            values, results, results, values, values, values, *tables, *numbers, shape,
            has_chunks, num_warps=4, num_stages=2, grid=(1, 1),
        )
        for has_chunks in (False, True)
    ]  # fmt: skip
    merge: Any = merge_parts.warmup(
        values, results, results, table, table, 5, 3, shape, num_warps=4, grid=(1, 1)
    )
    return _shared_bytes(*steps, merge)


def _compile_rows() -> int:
    """Compile the elementwise kernels for Llama 3's sizes."""
    x = torch.empty(64, dtype=torch.bfloat16)
    slots = torch.empty(64, dtype=torch.int64)
    norm = norms._norm_row.warmup(
        x, x, x, x, 1e-5, 4096, 0, 4096, HEADS=1, SIZE=4096, BLOCK=4096, HAS_DELTA=True,
        IS_CENTRED=False, grid=(1,),
    )  # fmt: skip
    gate = gates._gate_row.warmup(x, x, 28672, SIZE=14336, BLOCK=1024, IS_SILU=True, grid=(1, 1))
    heads = {"HEAD_BLOCK": 64, "HALF": 64, "HALF_BLOCK": 64, "grid": (1,)}
    rotate = rotary._rotate_token.warmup(x, x, x, 6144, 128, HEADS=40, **heads)
    store = rotary._rotate_and_store_token.warmup(
        x, x, x, x, x, x, slots, 6144, 128, 6144, 128, QUERY_HEADS=32, KV_HEADS=8, KV_BLOCK=8,
        HEAD_DIM=128, DIM_BLOCK=128, **heads,
    )  # fmt: skip
    return _shared_bytes(norm, gate, rotate, store)


def _shared_bytes(*kernels: Any) -> int:
    """Return what the largest takes of an assembled set."""
    assert all("cubin" in kernel.asm for kernel in kernels)
    return max(int(kernel.metadata.shared) for kernel in kernels)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(int(sys.argv[1]), *sys.argv[2:])) + "\n")
