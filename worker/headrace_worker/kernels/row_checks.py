"""The kernels over rows against torch's operators, once after loading."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional


def find_differences() -> Iterator[str]:
    """Yield the names of kernels that compute something else than torch on a few rows."""
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        rows = torch.randn(3, 70, generator=generator).to(dtype)
        for name, found, wanted in _results(rows):
            if not torch.allclose(found.float(), wanted.float(), rtol=tolerance, atol=tolerance):
                yield f"{name} in {dtype}"


def _results(rows: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield a name, what the kernel gives for ``rows [3, 70]``, and what torch gives."""
    ops, wide, ones = torch.ops.headrace, rows.float(), torch.ones_like(rows[0])
    normed = functional.rms_norm(wide, (70,), eps=1e-5)
    yield "rms_norm", ops.rms_norm(rows, ones, 1e-5, False), normed
    summed = rows.clone()
    doubled = ops.add_rms_norm(summed, rows, ones, 1e-5, False)
    yield "add_rms_norm", doubled, functional.rms_norm(2 * wide, (70,), eps=1e-5)
    yield "add_rms_norm's sum", summed, 2 * wide
    gate, up = wide.chunk(2, dim=-1)
    yield "silu_mul", ops.silu_mul(rows), functional.silu(gate) * up
    gelu = functional.gelu(gate, approximate="tanh")
    yield "gelu_tanh_mul", ops.gelu_tanh_mul(rows), gelu * up
    heads = rows[:, :64].clone().view(3, 4, 16)
    quarter = torch.tensor([0.0] * 16, dtype=rows.dtype).expand(3, 1, 16).contiguous()
    signs = torch.tensor([-1.0] * 8 + [1.0] * 8, dtype=rows.dtype).expand(3, 1, 16).contiguous()
    wanted = heads.roll(8, dims=-1) * signs  # a turn by ninety degrees
    ops.rotate(heads, quarter, signs)
    yield "rotate", heads, wanted
    maxima, places = ops.max_of_rows(rows)
    yield "max_of_rows", torch.stack((maxima, places)), torch.stack(wide.max(-1))
    numbers, scales = ops.quantize_rows(rows)
    yield "quantize_rows", numbers, (wide * (127 / wide.abs().amax(-1, keepdim=True))).round()
    restored = numbers.float()
    ops.scale_rows(restored, scales, None)
    yield "scale_rows", restored, numbers * scales[:, None]
