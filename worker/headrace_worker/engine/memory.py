"""How many KV blocks fit: ``num_blocks = (M - W - activations) / (block_size * k)``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from headrace_worker.engine.errors import SettingsError

CPU_SHARE = 0.25  # of the free memory, for the KV cache, when nothing was configured
CPU_LIMIT_BYTES = 1024**3  # and never more than this
LOGITS_COPIES = 5  # in float32: the model's, the adjusted ones, and three while they are drawn from
_MEMINFO = Path("/proc/meminfo")
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CONTAINER_USE = Path("/sys/fs/cgroup/memory.current")
_CONTAINER_STAT = Path("/sys/fs/cgroup/memory.stat")


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """The memory equation with its numbers filled in."""

    memory_budget_bytes: int  # M
    weights_bytes: int  # W
    activation_bytes: int
    kv_bytes_per_token: int  # k
    block_size: int  # tokens

    @property
    def num_blocks(self) -> int:
        """Blocks that fit, the trash block not counted."""
        room = self.memory_budget_bytes - self.weights_bytes - self.activation_bytes
        return room // (self.block_size * self.kv_bytes_per_token) - 1

    def check(self) -> None:
        """Raise SettingsError, naming the numbers, unless a block fits next to the trash block."""
        if self.num_blocks < 1:
            raise SettingsError(
                f"no KV block fits: budget {self.memory_budget_bytes} bytes - weights"
                f" {self.weights_bytes} - activations {self.activation_bytes}; two blocks of"
                f" {self.block_size} tokens take {2 * self.block_size * self.kv_bytes_per_token}"
            )


def plan_kv_cache(
    *,
    kv_cache_bytes: int,
    weights_bytes: int,
    activation_bytes: int,
    kv_bytes_per_token: int,
    block_size: int,
) -> KVCachePlan:
    """Plan with what the KV cache alone may take; raises SettingsError when that is too little."""
    plan = KVCachePlan(
        memory_budget_bytes=kv_cache_bytes + weights_bytes + activation_bytes,
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        block_size=block_size,
    )
    plan.check()
    return plan


def estimate_activation_bytes(
    *,
    num_tokens: int,
    num_rows: int,
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int,
    itemsize: int,
) -> int:
    """Bound the temporaries of one step: those of one layer for each token, and the logits.

    ``num_tokens`` is the token budget, ``num_rows`` the most rows whose logits are there at once.
    """
    per_token = (8 * hidden_size + 3 * intermediate_size) * itemsize
    return num_tokens * per_token + LOGITS_COPIES * num_rows * vocab_size * 4


def default_cpu_kv_bytes() -> int:
    """Return a modest share of the memory that is free now: others live on this machine, too."""
    return min(int(CPU_SHARE * _available_bytes()), CPU_LIMIT_BYTES)


def _available_bytes() -> int:
    """What the machine can still give, and the container, if this is one with a limit."""
    try:
        limit = int(_CONTAINER_LIMIT.read_text("ascii"))
        used = int(_CONTAINER_USE.read_text("ascii")) - _reclaimable_bytes()
    except (OSError, ValueError):  # no container, or "max": no limit
        return _available_on_machine()
    return min(max(0, limit - used), _available_on_machine())


def _reclaimable_bytes() -> int:
    """What the container's page cache would give back."""
    lines = _CONTAINER_STAT.read_text("ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _available_on_machine() -> int:
    """Count what the page cache would give back, where Linux tells: a model was just read."""
    try:
        lines = _MEMINFO.read_text("ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable:" in line)
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
