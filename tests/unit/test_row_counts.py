"""Which row counts run as they are, which are padded, and which are cut."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_worker.model.row_counts import TILE_ROWS, Part, RowCounts, multiply_padded, probe_rows

WEIGHT = torch.eye(4)


def counts_that_differ_at(*bad: int) -> RowCounts:
    """A product that rounds differently when it is given one of these row counts."""

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return x @ WEIGHT + (1e-3 if x.shape[0] in bad else 0)

    return RowCounts(multiply, WEIGHT)


def test_a_count_like_the_tile_runs_as_it_is() -> None:
    """Where the kernels agree, nothing is padded or cut."""
    counts = counts_that_differ_at()
    for num_rows in (0, 1, 7, 64, 65, 512):
        assert counts.parts(num_rows) == (Part(num_rows, num_rows),)


def test_the_tile_is_computed_once() -> None:
    """Prompts have ever new lengths; each is tried by its own product, not by another tile too."""
    calls: list[int] = []

    def multiply(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape[0])
        return x @ WEIGHT

    counts = RowCounts(multiply, WEIGHT)
    for num_rows in (100, 200, 300, 100):
        counts.parts(num_rows)
    assert calls == [TILE_ROWS, 100, 200, 300]


def test_a_small_count_is_padded_to_the_next_that_agrees() -> None:
    """Two to thirty-two rows in another kernel run as forty."""
    counts = counts_that_differ_at(*range(2, 33))
    assert counts.parts(1) == (Part(1, 1),)
    assert counts.parts(20) == (Part(20, 40),)
    assert counts.parts(33) == (Part(33, 33),)


def test_the_tile_itself_is_the_last_resort() -> None:
    """Where no smaller count agrees, a few rows run as a whole tile."""
    assert counts_that_differ_at(*range(1, 64)).parts(3) == (Part(3, TILE_ROWS),)


def test_a_large_count_is_cut_at_tiles() -> None:
    """A large count in another kernel is cut in halves of whole tiles until the parts agree."""
    assert counts_that_differ_at(512).parts(512) == (Part(256, 256), Part(256, 256))
    counts = counts_that_differ_at(200, 72)
    assert counts.parts(200) == (Part(128, 128), Part(64, 64), Part(8, 8))


def test_a_probe_shows_nothing_but_rounding() -> None:
    """Each probe row's exact product with its own row of the weight is zero, and not the others."""
    weight = torch.randn(64, 577).bfloat16()
    exact = probe_rows(weight).double() @ weight.double().T
    assert exact.diagonal().abs().max() == 0
    assert exact.abs().mean() > 1


@given(st.sets(st.integers(1, 300).filter(lambda n: n != TILE_ROWS)), st.integers(1, 300))
def test_the_parts_are_the_rows_and_agree_with_the_tile(bad: set[int], num_rows: int) -> None:
    """Whatever differs, the parts add up and none of them runs at a count that differs."""
    parts = counts_that_differ_at(*bad).parts(num_rows)
    assert sum(part.num_rows for part in parts) == num_rows
    assert all(part.num_padded_rows >= part.num_rows for part in parts)
    assert not bad & {part.num_padded_rows for part in parts}


def test_padding_leaves_no_trace() -> None:
    """A padded product has the rows that were asked for."""
    x = torch.randn(3, 4)
    assert torch.equal(multiply_padded(lambda rows: rows @ WEIGHT, x, 8), x)
