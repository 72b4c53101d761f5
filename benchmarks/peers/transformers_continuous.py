"""transformers' own continuous batching, through its manager, with a time for every token.

python -m benchmarks.peers.transformers_continuous JOB RESULT
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from benchmarks.job import Job, Result, TokenTimes, run_as_child, summarize
from benchmarks.memory import PeakMemory
from benchmarks.peers.transformers_model import load, version
from benchmarks.workload import Item

_LOOK_EVERY_S = 1.0


def measure(job: Job) -> Result:
    """Load the model, warm up, run the workload."""
    from transformers import GenerationConfig

    with PeakMemory(os.getpid()) as memory:
        model = load(job)
        make_config: Any = GenerationConfig  # transformers leaves it untyped
        with model.continuous_batching_context_manager(
            generation_config=make_config(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=_cache_config(job),
            timeout=5,
        ) as manager:
            _run(manager, job.warm_up)
            batches = [[item] for item in job.items] if job.is_sequential else [job.items]
            start_s = time.perf_counter()
            times = [got for batch in batches for got in _run(manager, batch)]
            elapsed_s = time.perf_counter() - start_s
    return summarize(
        job,
        times,
        system="transformers, continuous batching",
        version=version(),
        elapsed_s=elapsed_s,
        peak_rss_bytes=memory.peak_bytes,
    )


def _cache_config(job: Job) -> Any:
    """Give it the same share of memory for its cache as the others: it takes nearly all of it."""
    from transformers import ContinuousBatchingConfig

    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    make_config: Any = ContinuousBatchingConfig
    return make_config(max_memory_percent=job.kv_cache_bytes / total_bytes)


def _run(manager: Any, items: list[Item]) -> list[TokenTimes]:
    """Hand over all requests and wait for the last; raises RuntimeError when it gives up."""
    start_s = time.perf_counter()
    ids = [
        manager.add_request(
            item.prompt,
            max_new_tokens=item.num_output_tokens,
            record_timestamps=True,
            eos_token_id=-1,
        )
        for item in items
    ]
    done: dict[str, TokenTimes] = {}
    while len(done) < len(ids):
        result = manager.get_result(timeout=_LOOK_EVERY_S)
        if result is not None and result.error:
            raise RuntimeError(result.error)
        if result is not None and result.is_finished():
            done[result.request_id] = _times(result, start_s)
        if not manager.is_running():
            raise RuntimeError("its thread ended")
    return [done[request_id] for request_id in ids]


def _times(result: Any, start_s: float) -> TokenTimes:
    stamps = result.timestamps
    return TokenTimes(start_s, stamps[0], stamps[-1], len(result.generated_tokens))


if __name__ == "__main__":
    run_as_child(sys.argv[1:], measure)
