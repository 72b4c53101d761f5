"""The parts of the chaos harness judge rightly, in their own small worlds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace import Chunk
from headrace.errors import InvalidRequest, TransportError
from support.chaos_clients import View
from support.chaos_history import History, Outcome
from support.chaos_report import markdown
from support.chaos_result import Result, Size
from support.chaos_table import FAULTS
from support.repository import ROOT


@pytest.fixture
def history(tmp_path: Path) -> History:
    """Give an empty one."""
    return History(tmp_path / "history.jsonl")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(TransportError("gone"), Outcome.UNKNOWN), (InvalidRequest("no"), Outcome.FAILED)],
)
def test_an_operation_without_an_answer_is_unknown(
    history: History, error: Exception, outcome: Outcome
) -> None:
    """A lost connection says nothing about the outcome, a refusal says that it did not happen."""
    with pytest.raises(type(error)), history.operation("enqueue", "r1"):
        raise error
    assert history.ids("enqueue", outcome) == ["r1"]


def test_an_operation_is_on_disk_before_it_ends(history: History, tmp_path: Path) -> None:
    """Its invocation and its end are lines of their own, in order."""
    with history.operation("enqueue", "r1"):
        (invoked,) = (tmp_path / "history.jsonl").read_text().splitlines()
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert json.loads(invoked)["turn"] == "invoked"
    assert [json.loads(line)["turn"] for line in lines] == ["invoked", "ok"]


def test_a_view_notices_gaps_and_doubles() -> None:
    """A chunk that does not begin where the last one ended is written down as wrong."""
    view = View()
    for index in (0, 2, 5):
        view.take(Chunk(index, (1, 2), ""), now_s=index)
    assert view.wrong == ["a chunk at 5, and 4 was due"]
    assert view.silence_s(1.0) == 2.0
    assert view.silence_s(1.8) == 3.0
    assert view.silence_s(9.0) is None


def test_a_figure_outside_its_bounds_is_a_problem() -> None:
    """Bounds on time are widened by the slack of the size, other bounds are not."""
    result = Result("f", 1, "valkey", Size(1, slack=2.0))
    result.measure("lost", 1, at_most=0)
    result.time("recovery", 9.0, at_most_s=5.0)
    assert result.problems == ["lost 1 (≤ 0)"]
    assert result.verdict == "FAILED"


def test_a_run_is_never_smaller_than_the_one_of_the_tests() -> None:
    """A scale shrinks a full size as far as the short one."""
    assert Size(1000, rounds=10).scaled(0.5, Size(10)) == Size(500, rounds=5)
    assert Size(1000, rounds=10).scaled(0.0, Size(10, rounds=2)) == Size(10, rounds=2)


def test_every_fault_has_a_row_in_the_report() -> None:
    """Names are unique, and a fault that could not run says what it lacks."""
    results = [Result(f.name, 7, "valkey", f.short, missing="a disk") for f in FAULTS]
    lines = markdown(list(zip(FAULTS, results, strict=True))).splitlines()
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) == len(lines) - 2
    assert all("not run" in line and "a disk" in line for line in lines[2:])


def test_every_fault_is_in_the_tests() -> None:
    """A fault that the matrix leaves to another test names one that exists."""
    for fault in FAULTS:
        path, _, name = fault.tested_by.partition("::")
        assert not path or f"def {name}(" in (ROOT / path).read_text()
