"""The projection: packed or not it computes the same, and few rows give the bits of many."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from headrace_worker.model.linear import Linear, ProductShape, can_pack, empty_linear
from headrace_worker.model.row_counts import RowCounts

CPU = torch.device("cpu")


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize(("size_in", "size_out"), [(64, 128), (1536, 576), (576, 960), (576, 3072)])
def test_a_row_does_not_depend_on_the_number_of_rows(
    size_in: int, size_out: int, dtype: torch.dtype
) -> None:
    """Packed, a row has the same bits in a batch of any size and at any place in it."""
    torch.manual_seed(0)
    linear = Linear(torch.randn(size_out, size_in).to(dtype), torch.randn(size_out).to(dtype))
    linear.pack()
    rows = torch.randn(300, size_in).to(dtype)
    whole = linear(rows)
    for num_rows in (1, 2, 3, 5, 9, 16, 17, 31, 32, 33, 40, 63, 65, 100, 129, 256, 300):
        assert torch.equal(linear(rows[:num_rows]), whole[:num_rows]), num_rows
        assert torch.equal(linear(rows[-num_rows:]), whole[-num_rows:]), num_rows


def test_a_neighbour_that_is_not_a_number_stays_alone() -> None:
    """A row of NaN changes no bit of the rows beside it."""
    torch.manual_seed(0)
    linear = Linear(torch.randn(576, 576).bfloat16())
    linear.pack()
    rows = torch.randn(20, 576).bfloat16()
    sick = rows.clone()
    sick[7] = float("nan")
    healthy = [row for row in range(20) if row != 7]
    assert torch.equal(linear(sick)[healthy], linear(rows)[healthy])


def test_equal_shapes_share_what_is_known_of_them() -> None:
    """Thirty layers are tried out once, not thirty times."""
    known: dict[ProductShape, RowCounts] = {}
    for size_out in (12, 12, 16):
        Linear(torch.randn(size_out, 8)).pack(known=known)
    assert len(known) == 2


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@DTYPES
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
