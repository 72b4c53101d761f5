"""Decodes that run, and then a long prompt: how long their steps take before and meanwhile.

The last item of the job is the long prompt; it is handed over when all others have decoded for a
while. python -m benchmarks.systems.disturbed JOB RESULT
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.job import Job, Result, TokenTimes, run_as_child, summarize
from benchmarks.memory import PeakMemory
from benchmarks.systems.feed import ContinuousFeed
from benchmarks.systems.flags import settings_of
from benchmarks.systems.play import command, play
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.messages import StepOutcome

NUM_STEPS_BEFORE = 40  # with nothing but decodes
_FIRST_SEQ_ID = 1_000_000


def measure(job: Job) -> Result:
    """Load the model, warm up, let the decodes run, add the long prompt, wait for its token."""
    with PeakMemory(os.getpid()) as memory:
        engine, _ = load_engine(settings_of(job))
        feed = ContinuousFeed(job.warm_up)
        play(engine, job.warm_up, feed, first_seq_id=1, is_sequential=False)
        start_s = time.perf_counter()
        before_s, during_s = disturb(engine, job)
        elapsed_s = time.perf_counter() - start_s
    only_long = TokenTimes(0.0, sum(during_s), sum(during_s), 1)
    return summarize(
        Job(job.model, job.workload, job.items[-1:], []),
        [only_long],
        system="disturbed decodes",
        version=f"torch {torch.__version__}",
        elapsed_s=elapsed_s,
        peak_rss_bytes=memory.peak_bytes,
        details={"before_s": before_s, "during_s": during_s},
    )


def disturb(engine: Engine, job: Job) -> tuple[list[float], list[float]]:
    """Return the lengths of steps in seconds, without the long prompt and with it.

    A step is the time between two tokens of each decode. Raises RuntimeError when a decode ends
    too soon to be disturbed.
    """
    *decodes, long = job.items
    long_id = _FIRST_SEQ_ID + len(decodes)
    for place, item in enumerate(decodes):
        engine.add(command(_FIRST_SEQ_ID + place, item))
    _steps(engine, lambda outcome: len(outcome.tokens) == len(decodes))
    before_s = [engine.step().step_s for _ in range(NUM_STEPS_BEFORE)]
    if len(engine.scheduler.running) < len(decodes):
        raise RuntimeError("a decode ended before the long prompt arrived")
    engine.add(command(long_id, long))
    during_s = _steps(engine, lambda outcome: outcome.tokens[-1].seq_id == long_id)
    return before_s, during_s


def _steps(engine: Engine, is_last: Callable[[StepOutcome], bool]) -> list[float]:
    lengths_s = []
    while True:
        outcome = engine.step()
        lengths_s.append(outcome.step_s)
        if outcome.tokens and is_last(outcome):
            return lengths_s
        if outcome.finished or outcome.failed:
            raise RuntimeError("a decode ended before the long prompt was computed")


if __name__ == "__main__":
    run_as_child(sys.argv[1:], measure)
