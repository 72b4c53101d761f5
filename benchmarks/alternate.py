"""Runs systems in turn, so that whatever else the machine does falls on all of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.job import Job, Result
from benchmarks.systems.registry import SYSTEMS


def alternate(names: Sequence[str], job: Job, num_rounds: int) -> dict[str, list[Result]]:
    """Run each system once a round, in the order given; return their results by name.

    Raises RunFailed.
    """
    results: dict[str, list[Result]] = {name: [] for name in names}
    for name in names:
        SYSTEMS[name].prepare(job)
    for round_number in range(1, num_rounds + 1):
        for name in names:
            result = SYSTEMS[name].run(job)
            results[name].append(result)
            say(
                f"{job.workload}, round {round_number}: {SYSTEMS[name].label}"
                f" {result.elapsed_s:.1f} s, {result.output_tokens_per_s:.1f} output tokens/s"
            )
    return results


def say(line: str) -> None:
    """Tell whoever waits how far it is, without disturbing the tables on standard output."""
    print(line, file=sys.stderr, flush=True)
