"""The headrace command in tests: called in this process, or started as users start it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.cli.app import run_app

HEADRACE = (sys.executable, "-m", "headrace.cli.main")

Headrace = Callable[..., "Ended"]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def make_caller(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Headrace:
    """Return what calls the command in this process; results are read from the descriptors."""

    def headrace(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        capfd.readouterr()
        code = run_app()
        out, err = capfd.readouterr()
        return Ended(code, out, err)

    return headrace


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own, with only the given HEADRACE_ variables."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
    return subprocess.Popen(
        [*HEADRACE, *arguments],
        env={**inherited, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def processes_naming(text: str | Path) -> list[int]:
    """Return the processes whose command line or environment holds a text, this one apart."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if str(text).encode() in said and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found
