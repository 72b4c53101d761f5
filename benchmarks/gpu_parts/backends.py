"""Which attention backends can be measured on a device, and why the others cannot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from headrace_worker.attention import (
    AttentionBackend,
    AttentionNeed,
    create_backend,
    judge_backends,
)
from headrace_worker.attention.triton import TritonBackend

Factory = Callable[[], AttentionBackend]
REFERENCE = "reference"


def backends_for(
    device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
) -> dict[str, Factory]:
    """Return what makes each backend but the reference, best first; on a CPU, Triton interpreted.

    Of two versions of flash-attn, the one that a worker would take.
    """
    need = AttentionNeed(device, dtype, head_dim)
    make = partial(create_backend, device=device, dtype=dtype, head_dim=head_dim)
    found: dict[str, Factory] = {
        verdict.name: partial(make, verdict.name)
        for verdict in judge_backends(need)
        if verdict.obstacle is None and verdict.name != REFERENCE
    }
    if device.type == "cpu" and TritonBackend.obstacle(need) is None:
        found["triton"] = TritonBackend
    return found


def obstacles(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return why each backend that cannot run here cannot."""
    verdicts = judge_backends(AttentionNeed(device, dtype))
    return [verdict.obstacle for verdict in verdicts if verdict.obstacle is not None]
