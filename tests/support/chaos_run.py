"""``make chaos``: run the fault matrix, or a part of it again from its seed, and write the report.

Exit status 1 when a fault was not survived, or the red control was. What a machine lacks for a
fault is named, and the fault counts as not run.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from support.chaos_fault import Fault, run_fault
from support.chaos_report import JSON_NAME, MARKDOWN_NAME, Row, show, write
from support.chaos_table import FAULTS
from support.servers import KINDS

WIDTH = 160  # columns of a table that goes into a file


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for and return the exit status."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, _leave)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    faults = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    if options.list:
        for fault in faults:
            console.print(f"{fault.name}: {fault.injected_by}", highlight=False)
        return 0
    rows = run_all(faults, options, console)
    show(rows, console)
    options.out.mkdir(parents=True, exist_ok=True)
    write(rows, options.out, scale=options.scale)
    console.print(f"{options.out / JSON_NAME}, {options.out / MARKDOWN_NAME}", highlight=False)
    return 1 if any(result.problems for _, result in rows) else 0


def run_all(faults: Sequence[Fault], options: argparse.Namespace, console: Console) -> list[Row]:
    """Run each fault, on each server that is asked for, until the time is over."""
    ends_s = time.monotonic() + 60 * options.minutes if options.minutes else None
    rows: list[Row] = []
    for kind in options.server or KINDS[-1:]:
        for fault in faults:
            if ends_s is not None and time.monotonic() > ends_s:
                console.print(f"{fault.name}: no time left, not run", highlight=False)
                continue
            size = fault.full.scaled(options.scale, least=fault.short)
            if options.seconds is not None:
                size = replace(size, seconds=options.seconds)
            keep = options.keep and options.keep / f"{fault.name}-{kind}"
            console.print(f"{fault.name} on {kind}, seed {options.seed} …", highlight=False)
            result = run_fault(fault, size, seed=options.seed, kind=kind, keep=keep)
            console.print(f"  {result.verdict} in {result.took_s:.0f} s", highlight=False)
            rows.append((fault, result))
    return rows


def _leave(*_: object) -> None:
    sys.exit("told to leave")  # so that no server or worker stays behind


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m support.chaos_run", description=__doc__)
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--only", action="append", choices=names, help="this fault; repeatable")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31), help="of every schedule")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full size")
    parser.add_argument("--seconds", type=float, help="that a fault lasts which lasts, or the soak")
    parser.add_argument("--minutes", type=float, help="begin no fault after so long")
    parser.add_argument("--server", action="append", choices=KINDS, help="valkey; repeatable")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder of the report")
    parser.add_argument("--keep", type=Path, help="folder for histories and logs of workers")
    parser.add_argument("--list", action="store_true", help="show the faults and stop")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
