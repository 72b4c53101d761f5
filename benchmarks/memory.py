"""Peak resident memory of a process and all its descendants, from /proc.

Each process counts with its own peak, so pages that two of them share count twice, and peaks that
fall apart in time are added: an upper bound, taken in the same way of every system.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from types import TracebackType

_PROC = Path("/proc")
_LOOK_EVERY_S = 1.0  # seldom: the machine's few cores are being measured


class PeakMemory:
    """Watches a process tree while the ``with`` block runs; a child that ended still counts."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peaks: dict[int, int] = {}  # bytes by pid; owned by the thread, then by ``peak``
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self.look()

    @property
    def peak_bytes(self) -> int:
        """The sum of the peaks seen; whole once the block is left, while the processes live."""
        return sum(self._peaks.values())

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_EVERY_S):
            self.look()

    def look(self) -> None:
        """Read the peaks now, besides the looks that are taken every second."""
        for pid in process_tree(self._pid):
            self._peaks[pid] = max(self._peaks.get(pid, 0), _peak_of(pid))


def process_tree(pid: int) -> list[int]:
    """Return a process and its descendants, those of every thread; gone ones are left out."""
    found = [pid]
    for parent in found:  # grows while it is walked
        for children in _PROC.glob(f"{parent}/task/*/children"):
            try:
                found += map(int, children.read_text("ascii").split())
            except OSError:  # the thread ended between two looks
                continue
    return found


def cpu_s(pid: int) -> float:
    """Return the CPU time that a living process has used, user and system."""
    after_name = (_PROC / str(pid) / "stat").read_text("ascii").rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def _peak_of(pid: int) -> int:
    try:
        status = (_PROC / str(pid) / "status").read_text("ascii", errors="replace")
    except OSError:  # it ended between two looks
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
