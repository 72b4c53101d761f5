"""What Linux knows of processes: whose children they are, and whether they still run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Return the children that a process has now."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that ended meanwhile
            children += map(int, task.read_text().split())
    return children


def is_running(pid: int) -> bool:
    """Whether a process is there and not dead; one that nobody has waited for is."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def num_threads(pid: int) -> int:
    """Count the threads that a process has now."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))
