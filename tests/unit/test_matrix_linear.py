"""Projections on the CPU's matrix unit: what torch computes, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from headrace_worker.kernels import kernels_are_loaded
from headrace_worker.model.linear import Linear, has_matrix_unit

pytestmark = pytest.mark.skipif(
    not has_matrix_unit(torch.bfloat16), reason="this CPU has no AMX, or there is no C++ compiler"
)


def random_rows(num_rows: int, size: int, seed: int = 0) -> torch.Tensor:
    """Return ``[num_rows, size]`` in bfloat16."""
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Return the projection in the unit's layout."""
    linear = Linear(weight.clone(), bias)
    linear.pack()
    return linear


@pytest.mark.parametrize("num_rows", [0, 1, 15, 16, 17, 32, 33, 48, 100])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(96, 64), (33, 70), (1, 1), (64, 576)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_torch(
    num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool
) -> None:
    """Whatever is left over at the edges of matrices counts, and nothing else does."""
    weight, x = random_rows(num_outputs, num_inputs, 1), random_rows(num_rows, num_inputs, 2)
    bias = random_rows(1, num_outputs, 3)[0] if has_bias else None
    found = packed(weight, bias)(x)
    wanted = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-5 * num_inputs)


def test_rows_beyond_a_cache_are_taken_in_parts() -> None:
    """Where a part ends, no row is lost, taken twice or rounded otherwise."""
    linear, x = packed(random_rows(64, 1536, 1)), random_rows(300, 1536, 2)
    together = linear(x)
    assert torch.equal(torch.cat([linear(x[:40]), linear(x[40:270]), linear(x[270:])]), together)


@pytest.mark.parametrize("size", [32, 65, 500])
def test_rows_of_another_width_are_refused(size: int) -> None:
    """They are not read beyond their end."""
    with pytest.raises(RuntimeError, match="do not go with the weight"):
        packed(random_rows(32, 64, 1))(random_rows(2, size, 2))


@pytest.mark.parametrize("num_inputs", [70, 576])
def test_a_row_has_the_same_bits_in_any_company(num_inputs: int) -> None:
    """Neither the number of rows, nor the place among them, nor the threads change it."""
    linear, x = packed(random_rows(200, num_inputs, 1)), random_rows(70, num_inputs, 2)
    together = linear(x)
    for count in range(1, 70):
        assert torch.equal(linear(x[:count]), together[:count])
        assert torch.equal(linear(x[count:]), together[count:])
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(linear(x), together)
    finally:
        torch.set_num_threads(num_threads)


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    """Its own result is NaN; those beside it have the bits that they have without it."""
    linear, x = packed(random_rows(64, 96, 1)), random_rows(20, 96, 2)
    clean = linear(x)
    x[7, 5] = float("nan")
    spoilt = linear(x)
    assert spoilt[7].isnan().all()
    assert torch.equal(spoilt[:7], clean[:7])
    assert torch.equal(spoilt[8:], clean[8:])


def test_rows_need_not_be_contiguous() -> None:
    """A slice of wider rows is multiplied as a copy of it is."""
    linear, wide = packed(random_rows(64, 96, 1)), random_rows(20, 200, 2)
    assert torch.equal(linear(wide[:, 50:146]), linear(wide[:, 50:146].clone()))


def test_the_weight_is_kept_only_where_asked() -> None:
    """A tied head goes on as the embedding; other weights are there once."""
    kept, dropped = Linear(random_rows(64, 96)), Linear(random_rows(64, 96))
    kept.pack(keep_weight=True)
    dropped.pack()
    assert kept.nbytes == 2 * dropped.nbytes
    assert not hasattr(dropped, "weight")


def test_other_dtypes_take_another_way() -> None:
    """The unit multiplies bfloat16 only."""
    assert kernels_are_loaded()
    assert not has_matrix_unit(torch.float32)
