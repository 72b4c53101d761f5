"""The projection on the matrix unit against torch's own, once after loading."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

_TOLERANCE = 2e-2  # two roundings to bfloat16 in different places


def find_linear_differences() -> Iterator[str]:
    """Yield the name of the kernel if it computes something else than torch."""
    if not torch.ops.headrace.has_matrix_unit():
        return
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 70, generator=generator).bfloat16()
    rows = torch.randn(37, 70, generator=generator).bfloat16()
    bias = torch.randn(50, generator=generator).bfloat16()
    packed = torch.ops.headrace.pack_linear(weight)
    found = torch.ops.headrace.packed_linear(rows, packed, bias, 50).float()
    wanted = functional.linear(rows.float(), weight.float(), bias.float())
    if not torch.allclose(found, wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
        yield "packed_linear"
