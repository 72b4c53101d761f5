"""Runs parts one after the other, each in a process of its own that was started ahead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu_parts.setup import Setup

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT, ROOT / "producer", ROOT / "worker")  # nothing need be installed
LAST_S = 25.0  # for the part that runs when the time for all of them is up
GRACE_S = 120.0  # to start, to load and to compile, besides the time for measuring
_LOG, _RESULT = "parts.log", "result.json"
Child = subprocess.Popen[str]


def run_all(
    names: Sequence[str], setup: Setup, *, most_s: float, grace_s: float = GRACE_S
) -> Iterator[dict[str, Any]]:
    """Yield each part's result as soon as it is there; a part that hangs is ended.

    After ``most_s`` seconds none begins, and the one that runs then has ``LAST_S`` more. While one
    runs, the next one's process gets ready.
    """
    end_s = time.perf_counter() + most_s
    with (Path(setup.folder) / _LOG).open("wb") as log, ExitStack() as children:
        child = children.enter_context(_started(setup, log))
        for place, name in enumerate(names):
            following = place + 1 < len(names)
            waiting = children.enter_context(_started(setup, log)) if following else child
            left_s = end_s - time.perf_counter()
            if left_s > 0:
                yield _run(child, name, setup, min(setup.part_s + grace_s, left_s + LAST_S))
            else:
                yield {"part": name, "error": "left out, as the time was up", "seconds": 0.0}
            child = waiting


@contextmanager
def _started(setup: Setup, log: IO[bytes]) -> Iterator[Child]:
    """Start a process that waits for a part; it is gone when the block is left."""
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu_parts.child"],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=_environment(setup),
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def _environment(setup: Setup) -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*map(str, SOURCES), *([known] if known else [])])
    interpreted = {"TRITON_INTERPRET": "1"} if setup.device == "cpu" else {}
    return {**os.environ, **interpreted, "PYTHONPATH": path}


def _run(child: Child, name: str, setup: Setup, most_s: float) -> dict[str, Any]:
    result_file = Path(setup.folder) / _RESULT
    result_file.unlink(missing_ok=True)
    order = {"part": name, "setup": asdict(setup), "result": str(result_file)}
    started_s = time.perf_counter()
    try:
        child.communicate(json.dumps(order) + "\n", timeout=most_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        error = f"it took longer than {most_s:.0f} s"
    else:
        if result_file.is_file():
            result: dict[str, Any] = json.loads(result_file.read_text("utf-8"))
            return result
        error = f"its process ended with {child.returncode}: {_last_words(setup)}"
    return {"part": name, "error": error, "seconds": time.perf_counter() - started_s}


def _last_words(setup: Setup) -> str:
    lines = (Path(setup.folder) / _LOG).read_text("utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
