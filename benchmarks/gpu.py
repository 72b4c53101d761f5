"""The first hour on a GPU in four minutes: is it right, how fast is it, and what limits it.

    python benchmarks/gpu.py                        all parts; needs neither network nor model
    python benchmarks/gpu.py --only limits,decode   some of them
    python benchmarks/gpu.py --device cpu --tiny    every part at toy size, where there is no GPU

Each part is a process of its own, which measures for ``--seconds`` at most; one that fails is told
in the report, and the others go on. After ``--most-seconds`` none begins, and all of it ends within
25 more. Writes a table, and JSON under build/bench.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run by its path, perhaps without being installed
    _ROOT = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(_ROOT / folder) for folder in ("", "producer", "worker")]

import torch

from benchmarks.gpu_parts.parts import all_parts
from benchmarks.gpu_parts.setup import Setup
from benchmarks.gpu_parts.supervise import run_all
from benchmarks.gpu_parts.table import failures, gpu_rows
from benchmarks.machine import Machine
from benchmarks.store import FOLDER
from benchmarks.tables import HEADINGS, print_table

NO_GPU = 2  # exit status
_PART_S, _MOST_S = 15.0, 210.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts, write what they found; return 0, 1 for failures or wrong answers, NO_GPU."""
    options = _parse(argv)
    if obstacle := _obstacle(options.device, is_tiny=options.tiny):
        print(obstacle, file=sys.stderr)
        return NO_GPU
    names = _choose(options.only)
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(options.device, options.tiny, options.seconds, folder)
        data = _measure(names, setup, options.most_seconds)
    _save(options.output, data)
    print_table(HEADINGS, gpu_rows(data))
    return int(bool(failures(data["parts"])))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, whose figures mean nothing")
    parser.add_argument("--seconds", type=float, default=_PART_S, help="of measuring, for a part")
    parser.add_argument("--most-seconds", type=float, default=_MOST_S, help="of all parts")
    parser.add_argument("--only", default="", help="parts, separated by commas")
    parser.add_argument("--output", type=Path, default=FOLDER / "gpu.json", help="of the JSON")
    return parser.parse_args(argv)


def _obstacle(device: str, *, is_tiny: bool) -> str | None:
    """Say why nothing can be measured, in one line."""
    if torch.device(device).type == "cpu":
        return None if is_tiny else "On a CPU this measures nothing; --tiny runs it all the same."
    if torch.cuda.is_available():
        return None
    return f"torch {torch.__version__} sees no CUDA device; --device cpu --tiny runs every part."


def _choose(only: str) -> list[str]:
    known = all_parts()
    names = [name for name in only.split(",") if name] or list(known)
    if unknown := set(names) - set(known):
        raise SystemExit(f"no part {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def _measure(names: Sequence[str], setup: Setup, most_s: float) -> dict[str, Any]:
    started_s = time.perf_counter()
    parts: dict[str, Any] = {}
    for result in run_all(names, setup, most_s=most_s):
        parts[result.pop("part")] = result
        outcome = "failed" if "error" in result else "done"
        print(f"{list(parts)[-1]}: {outcome} in {result['seconds']:.1f} s", file=sys.stderr)
    return {"parts": parts, "seconds": time.perf_counter() - started_s}


def _save(output: Path, data: dict[str, Any]) -> None:
    about = {
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv[1:]),
        "machine": str(Machine.here()),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({**about, "data": data}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
