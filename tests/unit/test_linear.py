"""The projection: packed or not it computes the same, and few rows give the bits of many."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from headrace_worker.model.linear import Linear, can_pack, empty_linear

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 7, 9, 15, 16, 17, 40])
@pytest.mark.parametrize(("size_in", "size_out"), [(64, 128), (128, 64), (576, 960), (576, 3072)])
def test_a_row_does_not_depend_on_the_number_of_rows(
    num_rows: int, size_in: int, size_out: int
) -> None:
    """Packed, a float32 row has the same bits in a batch of any size."""
    torch.manual_seed(0)
    linear = Linear(torch.randn(size_out, size_in), torch.randn(size_out))
    linear.pack()
    rows = torch.randn(64, size_in)
    assert torch.equal(linear(rows[:num_rows]), linear(rows)[:num_rows])


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_computes_what_torch_does(dtype: torch.dtype, has_bias: bool, is_packed: bool) -> None:
    """Packed or not, with or without bias, the result is torch's in shape, dtype and value."""
    weight, x = torch.randn(12, 8).to(dtype), torch.randn(3, 8).to(dtype)
    bias = torch.randn(12).to(dtype) if has_bias else None
    linear = Linear(weight, bias)
    if is_packed:
        linear.pack()
    torch.testing.assert_close(linear(x), functional.linear(x, weight, bias))


def test_a_weight_moves_unless_it_is_kept() -> None:
    """A packed weight exists once, except a tied embedding, which is looked up as well."""
    moved, kept = Linear(torch.randn(12, 8)), Linear(torch.randn(12, 8))
    moved.pack()
    kept.pack(keep_weight=True)
    assert moved.is_packed
    assert kept.is_packed
    assert not hasattr(moved, "weight")
    assert kept.weight.shape == (12, 8)


def test_a_dtype_that_cannot_be_packed_is_left_as_it_is() -> None:
    """Where torch's operators refuse a dtype, the plain product runs."""
    assert not can_pack(torch.float64)
    linear = Linear(torch.randn(12, 8, dtype=torch.float64))
    linear.pack()
    assert not linear.is_packed
    assert linear(torch.randn(3, 8, dtype=torch.float64)).shape == (3, 12)


def test_no_rows_give_no_rows() -> None:
    """An empty batch passes through."""
    assert Linear(torch.randn(12, 8))(torch.empty(0, 8)).shape == (0, 12)


def test_allocation_has_the_shapes_a_checkpoint_has() -> None:
    """Weights are [out, in], and a bias exists only where there is one."""
    with_bias = empty_linear(8, 12, True, torch.bfloat16, CPU)
    assert with_bias.weight.shape == (12, 8)
    assert with_bias.bias is not None
    assert with_bias.bias.dtype == torch.bfloat16
    assert empty_linear(8, 12, False, torch.float32, CPU).bias is None
