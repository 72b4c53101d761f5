"""The matrix as a table: model family × option, what was compared and what came of it."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from support.matrix import Matrix, columns_of
from support.matrix_compare import Tally, total
from support.matrix_families import FAMILIES
from support.matrix_workload import FULL, SMALL, Size

WIDTH = 120  # columns of a table that goes into a file
Cells = dict[tuple[str, str], Tally]  # by family and option
CHANCES = {SMALL: 1, FULL: 3}  # how often each option that leaves something to chance is run


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the matrix, print it, and return the exit status: 1 when any token was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.equivalence.report", description=__doc__)
    parser.add_argument("--full", action="store_true", help="long prompts and answers")
    parser.add_argument("--minutes", type=float, default=0.0, help="go on with new workloads")
    parser.add_argument("--seed", type=int, default=0, help="of the first workload")
    parser.add_argument("--family", action="append", choices=list(FAMILIES), help="only this one")
    options = parser.parse_args(arguments)
    cells = fill(
        options.family or list(FAMILIES),
        size=FULL if options.full else SMALL,
        seed=options.seed,
        seconds=60 * options.minutes,
    )
    show(cells, Console(width=None if sys.stdout.isatty() else WIDTH))
    return 1 if total(cells.values()).failures else 0


def fill(families: Sequence[str], *, size: Size, seed: int, seconds: float) -> Cells:
    """Run every option of these families, at least once, and with new workloads until it is time.

    A family is always finished, so it takes somewhat longer than asked.
    """
    torch.set_num_threads(1)
    hide_bars: Any = disable_progress_bar  # transformers leaves it untyped
    hide_bars()
    cells: Cells = {}
    ends_s = time.monotonic() + seconds
    for number, (workload, family) in enumerate(_workloads(families, seed)):
        if number >= len(families) and time.monotonic() >= ends_s:
            return cells
        for column, tally in _row(family, size=size, seed=workload):
            cells.setdefault((family, column), Tally()).add(tally)
    raise AssertionError("workloads never end")


def _row(family: str, *, size: Size, seed: int) -> Iterator[tuple[str, Tally]]:
    with TemporaryDirectory() as folder:
        matrix = Matrix(family, Path(folder), seed=seed, size=size)
        for column in columns_of(family):
            try:
                yield column, matrix.run(column, times=CHANCES[size])
            except Exception:  # the table must be told to the end, whatever one cell finds
                broken = f"{family}, workload {seed}, {column}: {traceback.format_exc()}"
                yield column, Tally(failures=[broken])


def show(cells: Cells, console: Console) -> None:
    """Print a row for each cell, the sum, and every near-tie and failure in words.

    The difference is the largest of any logit from that of transformers, or from the same request's
    alone where bits are compared.
    """
    table = Table("model family", "option", title="Every token, whatever shares the batch")
    for heading in ("sequences", "ids", "identical", "near-ties", "difference", "failures"):
        table.add_column(heading, justify="right")
    families = list(dict.fromkeys(family for family, _ in cells))
    for family in families:
        for (of, option), tally in cells.items():
            if of == family:
                table.add_row(family, option, *_numbers(tally))
        table.add_section()
    everything = total(cells.values())
    table.add_row("all", "", *_numbers(everything), style="bold")
    console.print(table)
    for kind, lines in (("near-tie", everything.near_ties), ("failure", everything.failures)):
        for line in lines:
            console.print(f"{kind}: {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"matrix: {len(cells)} cells, {everything}", highlight=False, soft_wrap=True)


def _workloads(families: Iterable[str], seed: int) -> Iterator[tuple[int, str]]:
    while True:
        yield from ((seed, family) for family in families)
        seed += 1


def _numbers(tally: Tally) -> tuple[str, ...]:
    return (
        str(tally.num_sequences),
        str(tally.num_ids),
        str(tally.num_identical),
        str(len(tally.near_ties)),
        f"{tally.max_logit_difference:.1e}",
        str(len(tally.failures)),
    )
