"""The long run's own conduct: every part runs, and one failure is enough for its exit status."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FINE = (sys.executable, "-c", "print('counted 3'); print()")
BROKEN = (sys.executable, "-c", "print('counted 2', flush=True); raise SystemExit(3)")


@pytest.fixture
def long() -> ModuleType:
    """The script, which is no module of the tests' path."""
    spec = importlib.util.spec_from_file_location("long", Path(__file__).with_name("long.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_failing_part_stops_no_other(long: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    """The summary repeats the last line of each, and the status tells of the failure."""
    status = long.run_all({"first": BROKEN, "second": FINE})
    *_, first, second = capfd.readouterr().out.splitlines()
    assert status == 1
    assert first.startswith("first FAILED with status 3 in ")
    assert first.endswith(" s: counted 2")
    assert second.startswith("second passed in ")
    assert second.endswith(" s: counted 3")


def test_all_parts_passing_is_a_success(long: ModuleType) -> None:
    """Exit status 0."""
    assert long.run_all({"only": FINE}) == 0


def test_every_part_is_a_command_that_there_is(long: ModuleType) -> None:
    """Schedules, matrix and the demo model, each with a module of that name."""
    parts = long.parts_for(2.0)
    assert list(parts) == ["schedules", "matrix", "SmolLM2"]
    root = Path(long.ROOT)
    for command in parts.values():
        path = command[2].replace(".", "/") + ".py"
        assert (root / path).is_file() or (root / "tests" / path).is_file()
    assert parts["schedules"][-2:] == ("--minutes", "2.0")


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf"])
def test_a_time_that_is_none_is_refused(long: ModuleType, text: str) -> None:
    """Minutes are above zero, and the refusal names the value."""
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        long.minutes(text)
