"""How the worker's process ends: with its status, and at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace_worker.__main__ import main


def run(*lines: str) -> subprocess.CompletedProcess[str]:
    """Run a program that may leave as the worker does."""
    program = "\n".join(("from headrace_worker.__main__ import leave", *lines))
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("status", [0, 1, 2])
def test_a_worker_that_leaves_does_not_take_its_interpreter_apart(status: int) -> None:
    """What would run at an interpreter's end does not, so that nobody waits for it."""
    ended = run("import atexit", "atexit.register(print, 'late')", f"leave({status})")
    assert (ended.returncode, ended.stdout) == (status, "")


def test_a_worker_that_leaves_has_said_all() -> None:
    """What is still in the buffers of its output is written first."""
    ended = run("import sys", "print('out', end='')", "sys.stderr.write('err')", "leave(1)")
    assert (ended.stdout, ended.stderr) == ("out", "err")


def test_a_worker_whose_output_nobody_reads_leaves_all_the_same() -> None:
    """A log that was closed by others changes no status."""
    ended = run("import sys", "print('out')", "sys.stdout.close()", "leave(0)")
    assert ended.returncode == 0


def test_settings_that_are_wrong_end_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    """The fault is named on the error output."""
    assert main(["--max-num-seqs", "none"]) == 2
    assert "max-num-seqs" in capsys.readouterr().err.replace("_", "-")
