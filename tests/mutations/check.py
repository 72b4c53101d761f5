"""Plant faults in a copy of the source and see the tests catch them: ``make mutants``.

First every named test must pass without a fault. Then each fault is planted in a fresh copy, which
stands before the installed source on the path of the one test that must fail. The working tree is
never changed. The exit status is 1 when a fault survived, and 2 when no
fault has the name.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutations.fault import Fault
from mutations.faults import FAULTS
from support.repository import ROOT

_SOURCES = ("producer", "worker")
_PASSED, _FAILED = 0, 1  # exit statuses of pytest; any other means that nothing was tested
_USAGE = 2  # exit status of a call that asks for nothing
_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one fault."""

    fault: Fault
    is_caught: bool
    seconds: float
    output: str  # of pytest


def main(argv: Sequence[str] | None = None) -> int:
    """Check the faults that are asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="show the faults and stop")
    parser.add_argument("--only", default="", help="faults with this in their name")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args(argv)
    faults = [fault for fault in FAULTS if arguments.only in fault.name]
    if not faults:
        sys.stderr.write(f"no fault has {arguments.only!r} in its name\n")
        return _USAGE
    if arguments.list:
        _say(_row(fault.name, fault.file, fault.test) for fault in faults)
        return 0
    return _check(faults, arguments.processes)


def run_without_fault(tests: Iterable[str]) -> subprocess.CompletedProcess[str]:
    """Run tests against a copy in which nothing is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        return _run_pytest(_copy_source(Path(folder)), *sorted(set(tests)))


def try_fault(fault: Fault) -> Verdict:
    """Plant one fault and run its test."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy_source(Path(folder))
        fault.plant(copy)
        done = _run_pytest(copy, fault.test)
    seconds = time.monotonic() - started_s
    return Verdict(fault, done.returncode == _FAILED, seconds, done.stdout + done.stderr)


def _check(faults: list[Fault], num_processes: int) -> int:
    sound = run_without_fault(fault.test for fault in faults)
    if sound.returncode != _PASSED:
        _say([sound.stdout, sound.stderr, "the tests must pass before a fault is planted"])
        return 1
    _say([_row("fault", "file", "test", "caught", "seconds"), _row(*["---"] * 5)])
    num_survivors = 0
    with ThreadPoolExecutor(num_processes) as pool:
        for verdict in pool.map(try_fault, faults):
            fault, caught = verdict.fault, "yes" if verdict.is_caught else "NO"
            _say([_row(fault.name, fault.file, fault.test, caught, f"{verdict.seconds:.1f}")])
            if not verdict.is_caught:
                num_survivors += 1
                _say([verdict.output])
    _say([f"{len(faults)} faults, {num_survivors} survived"])
    return 1 if num_survivors else 0


def _copy_source(folder: Path) -> Path:
    for name in _SOURCES:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    return folder


def _run_pytest(copy: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run tests with ``copy`` before the installed source; no bytecode is left to be mistaken."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(copy / name) for name in _SOURCES),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    options = ["-q", "-x", "-p", "no:cacheprovider", "--tb=line"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
