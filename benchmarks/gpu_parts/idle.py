"""For what share of the time a device has nothing to do while the engine steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_parts.clock import Work, wait_for

Span = tuple[float, float]
"""From when until when something ran, in any one unit."""


def idle_share(work: Work, device: torch.device) -> float:
    """Return the share of the time, from first to last kernel, in which none ran, in [0, 1].

    The profiler makes Python a little slower, so it is less when nobody looks. On a CPU, torch's
    operators stand for kernels. Raises RuntimeError when the profiler saw nothing.
    """
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        work()
        wait_for(device)
    events = seen.events() or ()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == device.type.upper()
    ]
    if not spans:
        raise RuntimeError("the profiler saw no kernels; may it read the GPU's counters here?")
    return idle_of(spans)


def idle_of(spans: Iterable[Span]) -> float:
    """Return the share of the time between first start and last end that no span covers."""
    ordered = sorted(spans)
    first = covered_until = ordered[0][0]
    busy = 0.0
    for start, end in ordered:
        busy += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    whole = covered_until - first
    return 1 - busy / whole if whole else 0.0
