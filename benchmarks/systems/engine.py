"""The engine alone: no Redis, no second process; ``--static`` gives it static batches.

python -m benchmarks.systems.engine JOB RESULT [--static]
"""

from __future__ import annotations

import os
import sys
from dataclasses import astuple
from typing import Any

import torch

from benchmarks.job import Job, Result, run_as_child, summarize
from benchmarks.memory import PeakMemory
from benchmarks.systems.feed import ContinuousFeed, Feed, StaticFeed
from benchmarks.systems.flags import settings_of
from benchmarks.systems.play import Played, play
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.messages import EngineReady
from headrace_worker.garbage import spare_the_living

MEASURED_FROM = 1_000_000  # sequence ids of the measured run; those below warm up


def main() -> None:
    """Run one job."""
    is_static = "--static" in sys.argv
    arguments = [word for word in sys.argv[1:] if word != "--static"]
    run_as_child(arguments, lambda job: measure(job, is_static=is_static))


def measure(job: Job, *, is_static: bool) -> Result:
    """Load the model, warm up, run the workload."""
    with PeakMemory(os.getpid()) as memory:
        engine, ready = load_engine(settings_of(job))
        spare_the_living()
        played = run(engine, job, is_static=is_static)
    return summarize(
        job,
        played.times,
        system="static batches" if is_static else "engine alone",
        version=f"torch {torch.__version__}",
        elapsed_s=played.elapsed_s,
        peak_rss_bytes=memory.peak_bytes,
        details=_details(job, ready, played),
    )


def run(engine: Engine, job: Job, *, is_static: bool) -> Played:
    """Warm up, then play the workload."""
    play(engine, job.warm_up, ContinuousFeed(job.warm_up), first_seq_id=1, is_sequential=False)
    return play(
        engine,
        job.items,
        _feed(job, is_static=is_static),
        first_seq_id=MEASURED_FROM,
        is_sequential=job.is_sequential,
    )


def _feed(job: Job, *, is_static: bool) -> Feed:
    if job.is_sequential:
        return StaticFeed(job.items, 1)
    return StaticFeed(job.items, job.max_num_seqs) if is_static else ContinuousFeed(job.items)


def _details(job: Job, ready: EngineReady, played: Played) -> dict[str, Any]:
    return {
        "attention_backend": ready.attention_backend,
        "dtype": ready.dtype,
        "load_s": ready.load_s,
        "num_steps": len(played.steps),
        "step_s": sum(step.step_s for step in played.steps),
        "slot_use": played.slot_use(job.max_num_seqs),
        "steps": [astuple(step) for step in played.steps],
    }


if __name__ == "__main__":
    main()
