"""The projections on the matrix unit against torch's own, once after loading."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

_TOLERANCE = 2e-2  # two roundings to bfloat16 in different places


def find_linear_differences() -> Iterator[str]:
    """Yield the names of kernels that compute something else than torch."""
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
    weight = torch.randn(32, 70, generator=generator).bfloat16()  # 16 gates, 16 factors
    packed = torch.ops.headrace.pack_linear(weight)
    gate, factor = functional.linear(rows.float(), weight.float()).chunk(2, dim=-1)
    for is_gelu, wanted in (
        (False, functional.silu(gate) * factor),
        (True, functional.gelu(gate, approximate="tanh") * factor),
    ):
        found = torch.ops.headrace.packed_gated_linear(rows, packed, None, is_gelu).float()
        if not torch.allclose(found, wanted, rtol=2 * _TOLERANCE, atol=8 * _TOLERANCE):
            yield f"packed_gated_linear, {is_gelu=}"
    numbers = torch.randint(-127, 128, (50, 70), generator=generator)
    x = torch.randint(-127, 128, (37, 70), generator=generator)
    scales, row_scales = torch.full((50,), 0.25), torch.full((37,), 0.5)
    packed = torch.ops.headrace.pack_linear(numbers.to(torch.int8))
    found = torch.ops.headrace.packed_linear_int8(
        x.to(torch.int8), row_scales, packed, scales, None
    )
    if not torch.equal(found, ((x @ numbers.T) * 0.125).bfloat16()):
        yield "packed_linear_int8"
