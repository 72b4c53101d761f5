"""What a benchmark run is told on its command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.job import Job
from benchmarks.workload import WORKLOADS, Item, warm_up

QUICK_REQUESTS, FULL_REQUESTS = 32, 256
_QUICK_ROUNDS, _FULL_ROUNDS = 1, 3


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    model: str = "smollm2-135m"
    dtype: str = "bfloat16"
    quantization: str = "none"  # none, int8
    num_threads: int | None = None  # of everybody; None: our default, and all CPUs for peers
    num_requests: int = FULL_REQUESTS  # of the mixed and the shared workload
    most_requests: int = 1024  # of the sweep over their number
    num_rounds: int = _FULL_ROUNDS  # runs of each system, alternating
    is_quick: bool = False  # smaller sweeps
    only: tuple[str, ...] = ()  # sections; none: all
    worker_flags: tuple[str, ...] = ()  # for our worker and engine

    def job(self, workload: str, num_requests: int | None = None) -> Job:
        """Return a run of a named workload."""
        count = self.num_requests if num_requests is None else num_requests
        items = WORKLOADS[workload](count)
        return self.job_of(workload, items, is_sequential=workload == "single")

    def job_of(self, workload: str, items: list[Item], *, is_sequential: bool = False) -> Job:
        """Return a run of these items."""
        return Job(
            model=self.model,
            workload=workload,
            items=items,
            warm_up=warm_up(workload),
            is_sequential=is_sequential,
            dtype=self.dtype,
            quantization=self.quantization,
            num_threads=self.num_threads or len(os.sched_getaffinity(0)),
            worker_flags=[*self._thread_flags, *self.worker_flags],
        )

    @property
    def _thread_flags(self) -> list[str]:
        return [] if self.num_threads is None else ["--num-threads", str(self.num_threads)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what every command of the benchmark takes; what follows ``--`` goes to our worker."""
    parser.add_argument("--model", default="smollm2-135m", help="what `headrace worker` takes")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--quantization", default="none", choices=["none", "int8"])
    parser.add_argument("--num-threads", type=int, help="else our default; all CPUs for peers")
    parser.add_argument("--requests", type=int, help="of the mixed and the shared workload")
    parser.add_argument("--most-requests", type=int, default=1024, help="end of the sweep")
    parser.add_argument("--rounds", type=int, help="runs of each system, alternating")
    parser.add_argument("--quick", action="store_true", help="minutes, and rough figures")
    parser.add_argument("--only", default="", help="sections, separated by commas")
    parser.add_argument("worker", nargs="*", help="flags for our worker, after --")


def options_of(given: argparse.Namespace) -> Options:
    """Return the options of a parsed command line."""
    return Options(
        model=given.model,
        dtype=given.dtype,
        quantization=given.quantization,
        num_threads=given.num_threads,
        num_requests=given.requests or (QUICK_REQUESTS if given.quick else FULL_REQUESTS),
        most_requests=given.most_requests,
        num_rounds=given.rounds or (_QUICK_ROUNDS if given.quick else _FULL_ROUNDS),
        is_quick=given.quick,
        only=tuple(name for name in given.only.split(",") if name),
        worker_flags=tuple(given.worker),
    )


def parse(description: str, argv: Sequence[str] | None = None) -> Options:
    """Return the options of a command that takes no others."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add_options(parser)
    return options_of(parser.parse_args(argv))
