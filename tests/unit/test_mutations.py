"""The faults that `make mutants` plants: still found in the source, still with their tests."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from mutations.check import main, run_without_fault, try_fault
from mutations.fault import Fault, FaultDoesNotApply
from mutations.faults import FAULTS
from support.repository import ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault, tmp_path: Path) -> None:
    """Its text is in the source once, and what comes out is Python, and different."""
    (tmp_path / fault.file).parent.mkdir(parents=True)
    shutil.copy(ROOT / fault.file, tmp_path / fault.file)
    fault.plant(tmp_path)
    source = (tmp_path / fault.file).read_text("utf-8")
    compile(source, fault.file, "exec")
    assert source != (ROOT / fault.file).read_text("utf-8")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_test_of_a_fault_exists(fault: Fault) -> None:
    """A renamed test would catch nothing."""
    path, name = fault.test.split("::")
    function = re.escape(name.partition("[")[0])
    assert re.search(rf"^def {function}\(", (ROOT / path).read_text("utf-8"), re.MULTILINE)


def test_a_fault_that_drifted_from_the_source_is_an_error(tmp_path: Path) -> None:
    """Nothing planted would be nothing caught."""
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for before in ("x = 1", "y = 2"):
        with pytest.raises(FaultDoesNotApply, match=before):
            Fault("twice or never", "a.py", before, "x = 3", "t").plant(tmp_path)


@pytest.mark.parametrize("option", [[], ["--list"]])
def test_a_name_that_no_fault_has_runs_nothing(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt name is said at once; it does not run every test there is."""
    assert main(["--only", "zzz", *option]) == 2
    assert capsys.readouterr().err == "no fault has 'zzz' in its name\n"


def test_faults_have_names_of_their_own() -> None:
    """The table says which one survived."""
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 24


def test_a_planted_fault_is_caught_and_the_working_tree_left_alone() -> None:
    """The copy is what is tested: without the fault the test passes, and with it fails."""
    fault = next(fault for fault in FAULTS if fault.name == "trash block handed out")
    before = (ROOT / fault.file).read_bytes()
    assert run_without_fault([fault.test]).returncode == 0
    assert try_fault(fault).is_caught
    assert (ROOT / fault.file).read_bytes() == before


def test_a_harmless_change_is_not_called_caught() -> None:
    """A table of nothing but yes would prove nothing."""
    fault = next(fault for fault in FAULTS if fault.name == "trash block handed out")
    harmless = Fault("harmless", fault.file, fault.before, fault.before + "  # same", fault.test)
    assert not try_fault(harmless).is_caught
