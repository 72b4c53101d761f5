"""One row of the fault matrix: what is done to the system, and by which rule it has passed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from support.chaos_result import Result, Size
from support.chaos_stand import Stand, open_stand
from support.servers import binary_of


@dataclass(frozen=True, slots=True)
class Fault:
    """The closed table of them is ``chaos_table.FAULTS``."""

    name: str  # what --only takes
    injected_by: str  # for the report
    passes_when: str  # likewise
    run: Callable[[Stand], None]  # does it, checks it, and writes to the stand's result
    short: Size  # for every test run
    full: Size  # for `make chaos`
    server: dict[str, str] = field(default_factory=dict)  # options of the server
    tested_by: str = ""  # the test that shows it small, when that is not the matrix
    lacks: Callable[[], str] = lambda: ""  # what this machine has not got for it, by name


def run_fault(
    fault: Fault, size: Size, *, seed: int, kind: str = "valkey", keep: Path | None = None
) -> Result:
    """Run one fault; ``keep`` is a folder for its history and logs, else they are deleted."""
    result = Result(fault.name, seed, kind, size, missing=_missing(fault, kind))
    if result.missing:
        return result
    started_s = time.monotonic()
    with _folder(keep) as folder:
        try:
            with open_stand(folder, kind, fault.server, result) as stand:
                fault.run(stand)
        except Exception as error:  # a run that breaks off has failed; the others go on
            result.problems.append(f"broke off: {type(error).__name__}: {str(error)[:500]}")
    result.took_s = time.monotonic() - started_s
    return result


def _missing(fault: Fault, kind: str) -> str:
    return fault.lacks() if binary_of(kind) else f"{kind}-server"


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with TemporaryDirectory(prefix="headrace-chaos-", ignore_cleanup_errors=True) as name:
            yield Path(name)
        return
    shutil.rmtree(keep, ignore_errors=True)
    yield keep
