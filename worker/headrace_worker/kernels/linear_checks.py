"""The projections on the matrix unit against torch's own, once after loading."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

_TOLERANCE = 2e-2  # two roundings to bfloat16 in different places
_ROWS, _INPUTS, _OUTPUTS = 37, 70, 50  # none a multiple of what the unit takes at once
_GATES = 16  # then as many factors


def find_linear_differences() -> Iterator[str]:
    """Yield the names of kernels that compute something else than torch."""
    if not torch.ops.headrace.has_matrix_unit():
        return
    generator = torch.Generator().manual_seed(0)
    for results in (_bfloat16_results(generator), _int8_results(generator)):
        for name, found, wanted in results:
            if not torch.allclose(found.float(), wanted, rtol=_TOLERANCE, atol=4 * _TOLERANCE):
                yield name


def _bfloat16_results(
    generator: torch.Generator,
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield a name, what the kernel gives, and what torch gives in float32."""
    ops = torch.ops.headrace
    rows, weight = _random(generator, _ROWS, _INPUTS), _random(generator, _OUTPUTS, _INPUTS)
    bias = _random(generator, _OUTPUTS)
    found = ops.packed_linear(rows, ops.pack_linear(weight), bias, _OUTPUTS)
    yield "packed_linear", found, functional.linear(rows.float(), weight.float(), bias.float())
    weight = _random(generator, 2 * _GATES, _INPUTS)
    for is_gelu in (False, True):
        found = ops.packed_gated_linear(rows, ops.pack_linear(weight), None, is_gelu)
        wanted = _gated(functional.linear(rows.float(), weight.float()), is_gelu=is_gelu)
        yield f"packed_gated_linear, {is_gelu=}", found, wanted


def _int8_results(generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the same for whole numbers, each row and output with a scale of its own."""
    ops = torch.ops.headrace
    rows = torch.randint(-127, 128, (_ROWS, _INPUTS), generator=generator)
    weight = torch.randint(-127, 128, (_OUTPUTS, _INPUTS), generator=generator)
    row_scales = torch.rand(_ROWS, generator=generator)
    scales = torch.rand(_OUTPUTS, generator=generator) / 2**14  # sums are about 2^15
    bias = _random(generator, _OUTPUTS)
    wanted = (rows @ weight.T) * row_scales[:, None] * scales + bias.float()
    packed = ops.pack_linear(weight.to(torch.int8))
    found = ops.packed_linear_int8(rows.to(torch.int8), row_scales, packed, scales, bias)
    yield "packed_linear_int8", found, wanted
    first = slice(0, 2 * _GATES)
    packed = ops.pack_linear(weight[first].to(torch.int8))
    arguments = (rows.to(torch.int8), row_scales, packed, scales[first], bias[first])
    found = ops.packed_gated_linear_int8(*arguments, False)
    yield "packed_gated_linear_int8", found, _gated(wanted[:, first], is_gelu=False)


def _random(generator: torch.Generator, *size: int) -> torch.Tensor:
    return torch.randn(size, generator=generator).bfloat16()


def _gated(both: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    gate, factor = both.chunk(2, dim=-1)
    active = functional.gelu(gate, approximate="tanh") if is_gelu else functional.silu(gate)
    return active * factor
