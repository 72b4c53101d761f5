"""The process of one part: ready before its turn, gone after it.

    python -m benchmarks.gpu_parts.child    reads a line with name, setup and result file

A kernel that breaks the device so harms no other part, and each finds all the memory free.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.gpu_parts.parts import all_parts, run_part
from benchmarks.gpu_parts.setup import Setup
from headrace_worker.engine.loader import make_current


def main() -> None:
    """Wait for the turn, run the part, write its result; nothing is asked of it: end."""
    parts = all_parts()
    line = sys.stdin.readline()
    if not line:
        return
    order = json.loads(line)
    name, setup = order["part"], Setup(**order["setup"])
    make_current(torch.device(setup.device))
    result = run_part(name, parts[name], setup)
    Path(order["result"]).write_text(json.dumps(result), "utf-8")


if __name__ == "__main__":
    main()
