"""What a device's memory is spent on, measured before the KV cache takes the rest.

Over a cache of two blocks the largest step is computed and two graphs are recorded. Then all of it
is dropped, and what is left of the share that was allowed is for KV blocks::

    total     │ others, context │ weights │ activations │ graphs │ KV blocks … │  not allowed  │
              0                                                   gpu_memory_utilization · total
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace_worker.engine.graphs import Capture, GraphedDecoder


class Meter(Protocol):
    """How much of a device's memory is taken."""

    def total_bytes(self) -> int:
        """Return the memory of the whole device."""
        ...

    def free_bytes(self) -> int:
        """Return what nobody has, this process and others, with nothing kept back for later."""
        ...

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Run something; return how much memory it held at once, beyond what was held before."""
        ...


class CudaMeter:
    """Asks torch and the driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_bytes(self) -> int:
        """Return the memory of the whole device."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free_bytes(self) -> int:
        """Return what nobody has, once torch has given back what it does not use."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Run something; return how much memory it held at once, beyond what was held before."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run()
        return torch.cuda.max_memory_allocated(self._device) - before


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a device's memory is needed for, beside weights and KV blocks."""

    total_bytes: int  # of the device
    free_bytes: int  # with the weights loaded and nothing else of ours
    activation_bytes: int  # of the largest step
    graph_bytes: int  # of all graphs

    def kv_cache_bytes(self, utilization: float) -> int:
        """Return what is left for KV blocks; negative when even the rest does not fit."""
        kept_free = int((1 - utilization) * self.total_bytes)
        return self.free_bytes - kept_free - self.activation_bytes - self.graph_bytes


def measure(
    meter: Meter,
    run_largest_step: Callable[[], None],
    record_two: Callable[[], tuple[int, int]] | None,
    *,
    num_graphs: int,
) -> MemoryUse:
    """Measure with the weights loaded; ``record_two`` is as ``measure_two_graphs`` returns.

    None: there will be no graphs. The first run takes what is taken once and for all: compiled
    kernels, the libraries' workspaces.
    """
    run_largest_step()
    activation_bytes = meter.peak_bytes(run_largest_step)
    largest, next_one = record_two() if record_two else (0, 0)
    graph_bytes = largest + max(0, num_graphs - 1) * next_one
    return MemoryUse(meter.total_bytes(), meter.free_bytes(), activation_bytes, graph_bytes)


def measure_two_graphs(
    meter: Meter, graphed: GraphedDecoder, capture: Capture, sizes: tuple[int, ...]
) -> tuple[int, int]:
    """Return the bytes of the largest graph, and of the next, which shares its memory.

    Raises RuntimeError when the device cannot record.
    """
    before = meter.free_bytes()
    graphed.capture(capture, sizes[-1:])
    between = meter.free_bytes()
    graphed.capture(capture, sizes[-2:-1])
    return max(0, before - between), max(0, between - meter.free_bytes())
