"""Gates and factors in one projection: the bits of a projection and a product after it."""

from __future__ import annotations

import pytest
import torch

from headrace_worker.model.gated_linear import GatedLinear, GatedProduct
from headrace_worker.model.int8 import can_multiply_int8, int8_product
from headrace_worker.model.linear import Linear, has_matrix_unit
from headrace_worker.model.row_ops import best_row_ops

ROW_OPS = best_row_ops(torch.bfloat16, torch.device("cpu"))
needs_matrix_unit = pytest.mark.skipif(
    not has_matrix_unit(torch.bfloat16), reason="this CPU has no AMX, or there is no C++ compiler"
)


def random_rows(num_rows: int, size: int, seed: int = 0) -> torch.Tensor:
    """Return ``[num_rows, size]`` in bfloat16."""
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def pair(
    num_outputs: int, num_inputs: int, *, has_bias: bool = False, activation: str = "silu"
) -> tuple[GatedLinear, Linear]:
    """Return a projection to gates and factors, and one of the same weight that knows no gates."""
    weight = random_rows(num_outputs, num_inputs, 1)
    bias = random_rows(1, num_outputs, 3)[0] if has_bias else None
    gated, plain = GatedLinear(weight.clone(), bias, activation=activation), Linear(weight, bias)
    gated.pack()
    plain.pack()
    return gated, plain


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(32, 64), (96, 70), (6, 8), (1536, 576)])
def test_one_step_has_the_bits_of_two(
    num_outputs: int, num_inputs: int, has_bias: bool, activation: str
) -> None:
    """Whether or not the width can be fused, nothing but the time tells."""
    gated, plain = pair(num_outputs, num_inputs, has_bias=has_bias, activation=activation)
    for num_rows in (0, 1, 16, 17, 33, 70, 300):
        x = random_rows(num_rows, num_inputs, 2)
        assert torch.equal(gated.gated(x, ROW_OPS), ROW_OPS.gate(plain(x), activation))


@pytest.mark.skipif(
    not can_multiply_int8(torch.bfloat16),
    reason="this CPU, or its torch, does not multiply int8 exactly",
)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(32, 64), (96, 70), (6, 8), (1536, 576)])
def test_one_step_has_the_bits_of_two_in_eight_bits(num_outputs: int, num_inputs: int) -> None:
    """Rows are quantized before either; a row of NaN stays its own."""
    weight, bias = random_rows(num_outputs, num_inputs, 1), random_rows(1, num_outputs, 3)[0]
    gated = GatedLinear(weight.clone(), bias, activation="silu")
    gated.quantize(int8_product)
    plain = int8_product(weight, bias)
    x = random_rows(70, num_inputs, 2)
    x[33, 5] = float("nan")
    found, wanted = gated.gated(x, ROW_OPS), ROW_OPS.gate(plain(x), "silu")
    assert torch.equal(found.nan_to_num(9.0), wanted.nan_to_num(9.0))
    assert found[33].isnan().all()


@needs_matrix_unit
def test_gates_and_factors_are_fused_where_registers_take_them() -> None:
    """Widths that are no multiple of a register, and other number formats, take two steps."""
    fused, _ = pair(96, 64)
    too_narrow, _ = pair(40, 64)
    assert isinstance(fused._product, GatedProduct)
    assert not isinstance(too_narrow._product, GatedProduct)
    single = GatedLinear(torch.randn(96, 64), activation="silu")
    single.pack()
    assert not isinstance(single._product, GatedProduct)


@needs_matrix_unit
def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    """Its own result is NaN; those beside it have the bits that they have without it."""
    gated, _ = pair(64, 96)
    x = random_rows(40, 96, 2)
    clean = gated.gated(x, ROW_OPS)
    x[33, 5] = float("nan")
    spoilt = gated.gated(x, ROW_OPS)
    assert spoilt[33].isnan().all()
    assert torch.equal(spoilt[:33], clean[:33])
    assert torch.equal(spoilt[34:], clean[34:])


@needs_matrix_unit
def test_the_weight_is_there_once() -> None:
    """It is as large in turns as it was in two halves."""
    gated, plain = pair(96, 64)
    assert gated.nbytes == plain.nbytes
    assert not hasattr(gated, "weight")
