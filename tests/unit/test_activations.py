"""An activation gives a row the same bits alone and in any company, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.activations import ACT2FN

from headrace_worker.model.activations import ACTIVATIONS, even_parts

NAMES = pytest.mark.parametrize("name", ACTIVATIONS)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Leave the number of threads as it was found."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def sensitive_row(name: str, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``[width]`` values that torch rounds by their place in a tensor, where it does so."""
    values = torch.linspace(-9, 9, 4096).to(dtype)
    alone = torch.cat([ACT2FN[name](value[None]) for value in values])
    is_sensitive = alone != ACT2FN[name](values)
    chosen = values[is_sensitive] if is_sensitive.any() else values
    return chosen.repeat(width // len(chosen) + 1)[:width]


@NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [48, 1000, 4096, 4864, 33_000])
def test_company_changes_no_bit(name: str, dtype: torch.dtype, width: int) -> None:
    """Whether rows lie side by side or apart, on one thread or on more than share them evenly."""
    row = sensitive_row(name, width, dtype)
    for num_threads in (1, 2, 3, 5):
        torch.set_num_threads(num_threads)
        alone = ACTIVATIONS[name](row[None])
        for num_rows in (2, 3, 17, 31):
            rows = row.repeat(num_rows, 1)
            apart = row.repeat(num_rows, 2)[:, :width]
            for x in (rows, rows[None], apart):
                y = ACTIVATIONS[name](x)
                assert y.shape == x.shape
                assert torch.equal(y.view(-1, width), alone.expand(num_rows, -1))


@given(st.integers(0, 300), st.integers(1, 40_000), st.integers(1, 40), st.booleans())
def test_parts_add_up_and_threads_share_them_evenly(
    num_rows: int, width: int, num_threads: int, takes_all: bool
) -> None:
    """No stretch ends within a row or a vector, unless every row is a part of its own."""

    def count_stretches(num_elements: int, num_threads: int) -> int:
        if num_elements <= 16_384:
            return 1
        return num_threads if takes_all else min(num_threads, num_elements // 9_000)

    parts = even_parts(num_rows, width, num_threads, count_stretches)
    assert sum(parts) == num_rows
    for part in set(parts) - {1}:
        stretch, rest = divmod(part * width, count_stretches(part * width, num_threads))
        assert rest == 0
        assert stretch % width == 0 or stretch % 64 == width % 64 == 0


def test_rows_of_whole_vectors_are_rarely_cut() -> None:
    """Two threads share an odd number of rows of a common width; three leave one over."""
    count_stretches = ACTIVATIONS["silu"].count_stretches
    assert even_parts(511, 4864, 2, count_stretches) == (511,)
    assert even_parts(511, 4864, 3, count_stretches) == (510, 1)
    assert even_parts(511, 4850, 2, count_stretches) == (510, 1)


@NAMES
def test_no_rows_are_no_rows(name: str) -> None:
    """An expert that nobody chose has nothing to do."""
    assert ACTIVATIONS[name](torch.empty(0, 48)).shape == (0, 48)
