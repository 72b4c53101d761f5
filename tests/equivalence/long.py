"""``python -m tests.equivalence.long`` runs for half an hour or longer what `make test` samples.

Random schedules over the oracle, the matrix at full size, and SmolLM2 against ``generate``, each in
a process of its own. All run, whatever one finds; the last lines say what each one counted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = (sys.executable, "-m")


def parts_for(minutes: float) -> dict[str, tuple[str, ...]]:
    """Return the command of each part; the matrix takes what it takes, and half the time more."""
    return {
        "schedules": (*PYTHON, "support.long_run", "--minutes", str(minutes)),
        "matrix": (*PYTHON, "tests.equivalence.report", "--full", "--minutes", str(minutes / 2)),
        "SmolLM2": (*PYTHON, "support.demo_report"),
    }


def run_all(parts: Mapping[str, Sequence[str]]) -> int:
    """Run the parts one after another; return the exit status: 1 when any failed."""
    endings, num_failed = [], 0
    for name, command in parts.items():
        say(f"--- {name}: {' '.join(command[1:])}")
        started_s = time.monotonic()
        status, last_line = run(command)
        num_failed += status != 0
        outcome = "passed" if status == 0 else f"FAILED with status {status}"
        endings.append(f"{name} {outcome} in {time.monotonic() - started_s:.0f} s: {last_line}")
    say("---", *endings)
    return 1 if num_failed else 0


def run(command: Sequence[str]) -> tuple[int, str]:
    """Run a part from the repository's root and show its output; return status and last line."""
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    last_line = ""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            say(line.rstrip("\n"))
            last_line = line.strip() or last_line
    return process.returncode, last_line


def minutes(text: str) -> float:
    """Read a number of minutes; ArgumentTypeError unless it is above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def say(*lines: str) -> None:
    """Print at once, so that a long run can be watched."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.equivalence.long", description=__doc__)
    parser.add_argument("--minutes", type=minutes, default=10.0, help="for the random schedules")
    parser.add_argument("--part", choices=list(parts_for(1)), help="run this one alone")
    options = parser.parse_args()
    parts = parts_for(options.minutes)
    sys.exit(run_all({options.part: parts[options.part]} if options.part else parts))
