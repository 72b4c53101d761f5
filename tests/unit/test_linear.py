"""The projection: few float32 rows give the bits that many rows give."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from headrace_worker.model.linear import Linear, empty_linear

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 7, 9, 15, 16, 17, 40])
@pytest.mark.parametrize(("size_in", "size_out"), [(64, 128), (128, 64), (576, 960), (576, 3072)])
def test_a_row_does_not_depend_on_the_number_of_rows(
    num_rows: int, size_in: int, size_out: int
) -> None:
    """On one thread, a float32 row has the same bits in a batch of any size."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    linear = Linear(torch.randn(size_out, size_in), torch.randn(size_out))
    rows = torch.randn(64, size_in)
    assert torch.equal(linear(rows[:num_rows]), linear(rows)[:num_rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_computes_what_torch_does(dtype: torch.dtype) -> None:
    """With and without bias the result is torch's, in shape, dtype and value."""
    weight, bias = torch.randn(12, 8).to(dtype), torch.randn(12).to(dtype)
    x = torch.randn(3, 8).to(dtype)
    torch.testing.assert_close(Linear(weight, bias)(x), functional.linear(x, weight, bias))
    torch.testing.assert_close(Linear(weight)(x), functional.linear(x, weight))


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
