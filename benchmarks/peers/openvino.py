"""OpenVINO GenAI: its continuous-batching pipeline, driven step by step.

python -m benchmarks.peers.openvino JOB RESULT
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from benchmarks.job import Job, Result, TokenTimes, run_as_child, summarize
from benchmarks.memory import PeakMemory
from benchmarks.workload import Item

_PRECISION_HINTS = {"bfloat16": "bf16", "float32": "f32"}


def measure(job: Job) -> Result:
    """Load the model, warm up, run the workload; int8 is a matter of the exported model."""
    import openvino_genai as genai

    with PeakMemory(os.getpid()) as memory:
        pipeline = _load(job)
        _run(pipeline, job.warm_up, first_id=0)
        batches = [[item] for item in job.items] if job.is_sequential else [job.items]
        start_s = time.perf_counter()
        times: list[TokenTimes] = []
        for batch in batches:
            times += _run(pipeline, batch, first_id=1000 + len(times))
        elapsed_s = time.perf_counter() - start_s
    return summarize(
        job,
        times,
        system="OpenVINO GenAI",
        version=f"openvino-genai {genai.__version__}",
        elapsed_s=elapsed_s,
        peak_rss_bytes=memory.peak_bytes,
    )


def _load(job: Job) -> Any:
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = max(1, round(job.kv_cache_bytes / 1024**3))  # GB
    scheduler.enable_prefix_caching = True
    properties = {
        "INFERENCE_PRECISION_HINT": _PRECISION_HINTS[job.dtype],
        "INFERENCE_NUM_THREADS": job.num_threads,
    }
    return genai.ContinuousBatchingPipeline(job.model, scheduler, "CPU", properties)


def _run(pipeline: Any, items: list[Item], *, first_id: int) -> list[TokenTimes]:
    """Hand over requests as they arrive and step until all are done."""
    start_s = time.perf_counter()
    times = [TokenTimes(start_s + item.arrival_s) for item in items]
    handles: dict[int, Any] = {}
    num_given = 0
    while num_given < len(items) or handles:
        while num_given < len(items) and times[num_given].arrived_s <= time.perf_counter():
            handles[num_given] = _add(pipeline, first_id + num_given, items[num_given])
            num_given += 1
        if pipeline.has_non_finished_requests():
            pipeline.step()
        _read(handles, items, times)
    return times


def _add(pipeline: Any, request_id: int, item: Item) -> Any:
    import numpy
    import openvino
    import openvino_genai as genai

    options = genai.GenerationConfig()
    options.max_new_tokens = item.num_output_tokens
    options.ignore_eos = True
    options.do_sample = False
    prompt = openvino.Tensor(numpy.array([item.prompt], dtype=numpy.int64))
    return pipeline.add_request(request_id, prompt, options)


def _read(handles: dict[int, Any], items: list[Item], times: list[TokenTimes]) -> None:
    """Note what came since the last step, and forget whoever has all tokens."""
    now_s = time.perf_counter()
    for place, handle in list(handles.items()):
        while handle.can_read():
            outputs = handle.read().values()
            times[place].saw(now_s, sum(len(output.generated_ids) for output in outputs))
        if times[place].num_tokens >= items[place].num_output_tokens:
            del handles[place]


if __name__ == "__main__":
    run_as_child(sys.argv[1:], measure)
