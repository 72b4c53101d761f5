"""The sections of the benchmark: each measures one thing and returns it as data for tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.alternate import alternate
from benchmarks.figures import percentile, ratio, summary
from benchmarks.job import Job, Result
from benchmarks.options import Options
from benchmarks.workload import LONG_PROMPT_TOKENS, Item, uniform

Data = dict[str, Any]
_OVERHEAD = ("engine", "redis")
_OVERHEADS = ("redis", "engine", "bulk")  # so that each stands beside the engine
_BATCHES = 4  # that static batching takes the workload in
_SLOT_POINTS = 400  # that a plot of slot use keeps


def throughput(options: Options) -> Data:
    """Mixed: the engine alone, through Redis with streams and in bulk, and their ratios."""
    return _with_bulk(options.job("mixed"), options.num_rounds)


def shared_prefix(options: Options) -> Data:
    """The same with a prefix of 256 tokens that all prompts share and the cache has."""
    return _with_bulk(options.job("shared"), options.num_rounds)


def step_split(options: Options) -> Data:
    """Mixed once more, with a timer before each part of a step."""
    result = alternate(("timed",), options.job("mixed"), 1)["timed"][0]
    return {"split_s": result.details["step_split_s"]}


def static_batching(options: Options) -> Data:
    """Mixed on the same engine, in static batches and continuously: throughput and slot use."""
    job = options.job("mixed")
    num_slots = max(1, len(job.items) // _BATCHES)  # one batch of all would be neither
    results = alternate(("static", "engine"), replace(job, max_num_seqs=num_slots), 1)
    return {
        "static": {**summary(results["static"]), **_slots(results["static"])},
        "continuous": {**summary(results["engine"]), **_slots(results["engine"])},
        "gain": ratio(results["engine"], results["static"]),
    }


def single(options: Options) -> Data:
    """Requests one after another: the latency of a machine with nothing else to do."""
    return _both(options.job("single", 2 if options.is_quick else 5), options.num_rounds)


def bursty(options: Options) -> Data:
    """Requests that arrive in bursts, through Redis: how long the first token takes then."""
    count = 16 if options.is_quick else 128
    results = alternate(("redis",), options.job("bursty", count), 1)
    return {"redis": summary(results["redis"])}


def long_context(options: Options) -> Data:
    """Prompts of 2,048 tokens, where attention counts."""
    results = alternate(("engine",), options.job("long", 2 if options.is_quick else 16), 1)
    return {"engine": summary(results["engine"])}


def chunking(options: Options) -> Data:
    """How long running decodes wait while a long prompt is computed, by token budget."""
    return {"budgets": [_disturb(options, budget) for budget in _budgets(options)]}


def num_requests_sweep(options: Options) -> Data:
    """Mixed workloads of more and more requests: cost has to grow in proportion."""
    counts = (16, 32) if options.is_quick else _fourfold(64, options.most_requests)
    return {"points": [_point(options.job("mixed", count), count) for count in counts]}


def prompt_length_sweep(options: Options) -> Data:
    """Requests of one size: throughput by prompt length."""
    lengths = (32, 256) if options.is_quick else (32, 128, 512, 1024, 2048)
    count = 8 if options.is_quick else 64
    jobs = (options.job_of("uniform", uniform(count, length, 64)) for length in lengths)
    return {"points": [_point(job, size) for job, size in zip(jobs, lengths, strict=True)]}


def num_workers_sweep(options: Options) -> Data:
    """The same threads in one worker or in two that share the queue."""
    num_threads = options.job("mixed", 1).num_threads
    whole = replace(options, num_threads=num_threads)
    halved = replace(options, num_threads=max(1, num_threads // 2))
    one = alternate(("redis",), whole.job("mixed"), 1)["redis"]
    two = alternate(("redis-2",), halved.job("mixed"), 1)["redis-2"]
    return {"points": [_measured(one[0], 1), _measured(two[0], 2)]}


SECTIONS: dict[str, Callable[[Options], Data]] = {
    "throughput": throughput,
    "step": step_split,
    "static": static_batching,
    "single": single,
    "shared": shared_prefix,
    "bursty": bursty,
    "long": long_context,
    "chunking": chunking,
    "num_requests": num_requests_sweep,
    "prompt_length": prompt_length_sweep,
    "num_workers": num_workers_sweep,
}


def _with_bulk(job: Job, num_rounds: int) -> Data:
    results = alternate(_OVERHEADS, job, num_rounds)
    return {
        **_overhead(results),
        "bulk": summary(results["bulk"]),
        "bulk_ratio": ratio(results["bulk"], results["engine"]),
    }


def _both(job: Job, num_rounds: int) -> Data:
    return _overhead(alternate(_OVERHEAD, job, num_rounds))


def _overhead(results: dict[str, list[Result]]) -> Data:
    return {
        **{name: summary(results[name]) for name in _OVERHEAD},
        "ratio": ratio(results["redis"], results["engine"]),
        "transport_cpu_s": median(r.details["transport_cpu_s"] for r in results["redis"]),
    }


def _slots(results: list[Result]) -> Data:
    """Return slot use, its course over one run, and the share of the run spent in steps."""
    steps = results[-1].details["steps"]
    thinned = steps[:: max(1, len(steps) // _SLOT_POINTS)]
    return {
        "slot_use": median(result.details["slot_use"] for result in results),
        "slots_over_time": [(end_s, num_seqs) for end_s, _, num_seqs, _ in thinned],
    }


def _budgets(options: Options) -> tuple[int, ...]:
    whole = LONG_PROMPT_TOKENS + _num_decodes(options) + 1
    return (256, whole) if options.is_quick else (128, 256, 512, whole)


def _num_decodes(options: Options) -> int:
    return 16 if options.is_quick else 63


def _disturb(options: Options, budget: int) -> Data:
    num_decodes = _num_decodes(options)
    items: list[Item] = uniform(num_decodes, 32, 256) + uniform(1, LONG_PROMPT_TOKENS, 1)
    job = options.job_of("disturbed", items)
    flags = [*job.worker_flags, "--max-num-batched-tokens", str(budget)]
    job = replace(job, max_num_seqs=num_decodes + 1, worker_flags=flags)
    result = alternate(("disturbed",), job, 1)["disturbed"][0]
    before_s, during_s = result.details["before_s"], result.details["during_s"]
    return {
        "budget": budget,
        "is_chunked": budget < LONG_PROMPT_TOKENS,
        "num_decodes": num_decodes,
        "before_p50_s": percentile(before_s, 0.5),
        "before_p99_s": percentile(before_s, 0.99),
        "during_p50_s": percentile(during_s, 0.5),
        "during_p99_s": percentile(during_s, 0.99),
        "rise": percentile(during_s, 0.99) / percentile(before_s, 0.99),
        "long_ttft_s": result.ttft_s[0],
        "step_s": before_s + during_s,
        "num_before": len(before_s),
    }


def _point(job: Job, at: int) -> Data:
    return _measured(alternate(("engine",), job, 1)["engine"][0], at)


def _measured(result: Result, at: int) -> Data:
    return {
        "at": at,
        "output_tokens_per_s": result.output_tokens_per_s,
        "total_tokens_per_s": result.output_tokens_per_s
        * (1 + result.num_prompt_tokens / result.num_output_tokens),
        "peak_rss_bytes": result.peak_rss_bytes,
    }


def _fourfold(first: int, last: int) -> tuple[int, ...]:
    counts = [first]
    while counts[-1] * 4 <= last:
        counts.append(counts[-1] * 4)
    return tuple(counts)
