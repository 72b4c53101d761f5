"""How long work takes on a device, without the time that Python takes to launch it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

Work = Callable[[], object]
_MOST = 50  # runs of a measurement


class Deadline:
    """When a part should end: it measures on until then, and begins nothing new afterwards."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.perf_counter() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left; 0 afterwards."""
        return max(0.0, self._end_s - time.perf_counter())


def wait_for(device: torch.device) -> None:
    """Return when the device has done what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def recorded(work: Work, device: torch.device) -> Work:
    """Return what repeats ``work`` as a CUDA graph; on a CPU, ``work`` itself.

    What it reads and writes stays where it is, so a repetition does the same work again.
    """
    work()  # compiles, and loads libraries, which cannot be captured
    if device.type != "cuda":
        return work
    wait_for(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def seconds_of(work: Work, device: torch.device, *, most_s: float) -> float:
    """Return the median time of a run, after one that warms up."""
    work()
    wait_for(device)
    times_s: list[float] = []
    while not times_s or (sum(times_s) < most_s and len(times_s) < _MOST):
        times_s.append(_time(work, device))
    return median(times_s)


def _time(work: Work, device: torch.device) -> float:
    if device.type != "cuda":
        started_s = time.perf_counter()
        work()
        return time.perf_counter() - started_s
    make_event: Any = torch.cuda.Event  # torch leaves it untyped
    start, end = make_event(enable_timing=True), make_event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
