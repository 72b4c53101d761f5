"""What a figure was made on: processor, cores, memory, versions, commit."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


@dataclass(frozen=True, slots=True)
class Machine:
    """Read once, at the start of a run."""

    processor: str
    features: tuple[str, ...]  # of those that decide how fast matrices multiply
    num_cpus: int  # that this process may use
    memory_gib: float
    versions: str
    commit: str  # short; "+" where the tree differs from it

    @classmethod
    def here(cls) -> Machine:
        """Return this machine."""
        told = Path("/proc/cpuinfo").read_text("ascii", errors="replace")
        flags = set(_after(told, "flags").split())
        return cls(
            processor=_after(told, "model name") or platform.machine(),
            features=tuple(name for name in _FEATURES if name in flags),
            num_cpus=len(os.sched_getaffinity(0)),
            memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
            versions=f"Python {platform.python_version()}, torch {version('torch')}",
            commit=_commit(),
        )

    def __str__(self) -> str:
        features = " ".join(self.features)
        return (
            f"{self.processor} ({features}), {self.num_cpus} CPUs, {self.memory_gib} GiB;"
            f" {self.versions}; commit {self.commit}"
        )


def _after(text: str, key: str) -> str:
    found = re.search(rf"^{key}\s*: (.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    folder = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git on this machine
        return "unknown"
    return done.stdout.strip() or "unknown"
