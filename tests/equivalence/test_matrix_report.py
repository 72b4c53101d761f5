"""The matrix's table: what it says, and how its command ends."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

from support.matrix import COLUMNS, Matrix
from support.matrix_compare import Tally
from support.matrix_report import Cells, fill, main, show
from support.matrix_workload import SMALL
from support.repository import ROOT

COMMAND = (sys.executable, "-m", "tests.equivalence.report")


def printed(cells: Cells) -> str:
    """Return the table as text."""
    console = Console(file=io.StringIO(), width=140)
    show(cells, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_each_cell_has_a_row_and_all_have_a_sum() -> None:
    """Counts stand in their columns."""
    text = printed({("llama", "x"): Tally(2, 30, 30, 1e-5), ("qwen3", "x"): Tally(1, 12, 12, 2e-5)})
    rows = [line.replace("│", " ").split() for line in text.splitlines() if "│" in line]
    assert ["llama", "x", "2", "30", "30", "0", "1.0e-05", "0"] in rows
    assert ["all", "3", "42", "42", "0", "2.0e-05", "0"] in rows


def test_near_ties_and_failures_are_told_in_words() -> None:
    """Both are counted, and each has a line, brackets and all."""
    text = printed({("llama", "x"): Tally(1, 2, 1, 0.0, ["[3] for 4"], ["a block is stale"])})
    assert "near-tie: [3] for 4\nfailure: a block is stale\n" in text
    assert text.splitlines()[-1] == (
        "matrix: 1 cells, sequences 1, ids compared 2, identical 1, near-ties 1,"
        " largest difference 0.0e+00, failures 1"
    )


def test_a_cell_that_breaks_is_a_failure_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The traceback stands below the table."""

    def run(matrix: Matrix, column: str, *, times: int) -> Tally:
        if column == "together":
            raise RuntimeError("a block is lost")
        return Tally(1, 2, 2)

    monkeypatch.setattr(Matrix, "run", run)
    cells = fill(["llama"], size=SMALL, seed=0, seconds=0)
    broken = [cell for cell, tally in cells.items() if tally.failures]
    assert broken == [("llama", "together")]
    assert "RuntimeError: a block is lost" in cells[broken[0]].failures[0]
    assert len(cells) == len(COLUMNS)


def test_the_command_needs_nothing_but_the_repository() -> None:
    """It runs from the root by module name, without pytest's path."""
    done = subprocess.run(
        [*COMMAND, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--family" in done.stdout


def test_an_unknown_family_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """The message lists those that there are."""
    with pytest.raises(SystemExit) as refused:
        main(["--family", "abacus"])
    assert refused.value.code == 2
    assert "'abacus'" in capsys.readouterr().err
