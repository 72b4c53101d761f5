"""The engine alone with a timer before each part of a step: where the time goes.

Reading the clock so often takes time itself, so throughput is measured elsewhere.
python -m benchmarks.systems.timed JOB RESULT
"""

from __future__ import annotations

import os
import sys

import torch

from benchmarks.job import Job, Result, run_as_child, summarize
from benchmarks.memory import PeakMemory
from benchmarks.systems.engine import MEASURED_FROM
from benchmarks.systems.feed import ContinuousFeed
from benchmarks.systems.flags import settings_of
from benchmarks.systems.play import Played, play
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.runner import ModelRunner
from headrace_worker.engine.timing import StepSplit, StepTimer


def measure(job: Job) -> Result:
    """Load the model, warm up, run the workload with the timer in place."""
    with PeakMemory(os.getpid()) as memory:
        engine, _ = load_engine(settings_of(job))
        played, split = run_timed(engine, job)
    return summarize(
        job,
        played.times,
        system="engine, timed",
        version=f"torch {torch.__version__}",
        elapsed_s=played.elapsed_s,
        peak_rss_bytes=memory.peak_bytes,
        details={"step_split_s": parts_of(split, played)},
    )


def run_timed(engine: Engine, job: Job) -> tuple[Played, StepSplit]:
    """Play the workload; return what happened and where the time of the steps went."""
    play(engine, job.warm_up, ContinuousFeed(job.warm_up), first_seq_id=1, is_sequential=False)
    assert isinstance(engine.runner, ModelRunner)  # load_engine makes no other
    with StepTimer(engine.runner) as timer:
        feed = ContinuousFeed(job.items)
        played = play(
            engine, job.items, feed, first_seq_id=MEASURED_FROM, is_sequential=job.is_sequential
        )
    return played, timer.split()


def parts_of(split: StepSplit, played: Played) -> dict[str, float]:
    """Return seconds by part; together they are the whole run."""
    steps_s = sum(step.step_s for step in played.steps)
    return {
        "linears": split.linears_s,
        "attention": split.attention_s,
        "elementwise": split.elementwise_s,
        "head": split.head_s,
        "sampling": split.sampling_s,
        "batch, embedding, Python of the forward": split.rest_s,
        "scheduling and commit": steps_s - split.total_s,
        "between steps": played.elapsed_s - steps_s,
    }


if __name__ == "__main__":
    run_as_child(sys.argv[1:], measure)
