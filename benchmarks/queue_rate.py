"""Claims per second of the queue: workers with an engine that computes nothing.

All requests are queued before a worker starts. Each asks for one token, so a request is one claim,
one emit and one acknowledgement. The rate is taken between the tenth and the ninetieth percent, so
neither start nor end counts. Redis's CPU time per request says where Redis itself would end.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from benchmarks.alternate import say
from benchmarks.memory import cpu_s, process_tree
from benchmarks.options import Options
from benchmarks.systems.queue_run import Worker, running_workers
from headrace import AsyncClient
from headrace.cli.embedded import embedded_server
from headrace.functions import depth
from headrace.functions import run as call
from headrace.keys import Keys

_FAKE_ENGINE = Path(__file__).parents[1] / "tests/support/fake_engine.py"
_QUEUE = "default"
_PROMPT = [5, 6, 7, 8]
_ENQUEUE_AT_ONCE = 200
_LOOK_EVERY_S = 0.02
_SHARES = (0.1, 0.9)  # of the requests, between which the rate is taken


@dataclass(frozen=True, slots=True)
class _Reading:
    """Taken at one moment."""

    at_s: float
    num_finished: int
    redis_cpu_s: float  # of the server, user and system
    worker_cpu_s: float  # of all workers and their engines


def queue_rate(options: Options) -> dict[str, Any]:
    """Measure with more and more workers."""
    counts, num_requests = ((1, 2), 400) if options.is_quick else ((1, 2, 3, 4), 4000)
    points = []
    for num_workers in counts:
        points.append(measure(options.model, num_workers, num_requests))
        say(f"queue, {num_workers} workers: {points[-1]['claims_per_s']:.0f} claims/s")
    return {"num_requests": num_requests, "points": points}


def measure(model: str, num_workers: int, num_requests: int) -> dict[str, Any]:
    """Queue the requests, let workers take them, and return rate and CPU time per request."""
    with tempfile.TemporaryDirectory() as name, embedded_server(Path(name)) as server:
        return asyncio.run(_measure(model, server.url, Path(name), num_workers, num_requests))


async def _measure(
    model: str, url: str, folder: Path, num_workers: int, num_requests: int
) -> dict[str, Any]:
    async with AsyncClient(url) as client:
        for first in range(0, num_requests, _ENQUEUE_AT_ONCE):
            count = min(_ENQUEUE_AT_ONCE, num_requests - first)
            await asyncio.gather(*(client.submit(_PROMPT, max_tokens=1) for _ in range(count)))
    async with (
        Redis.from_url(url) as redis,
        running_workers(url, _flags(model), folder, num_workers) as workers,
    ):
        start, end = [
            await _when_finished(redis, workers, int(share * num_requests), num_requests)
            for share in _SHARES
        ]
    num_between, elapsed_s = end.num_finished - start.num_finished, end.at_s - start.at_s
    return {
        "num_workers": num_workers,
        "claims_per_s": num_between / elapsed_s,
        "redis_use": (end.redis_cpu_s - start.redis_cpu_s) / elapsed_s,
        "redis_cpu_us": 1e6 * (end.redis_cpu_s - start.redis_cpu_s) / num_between,
        "worker_cpu_us": 1e6 * (end.worker_cpu_s - start.worker_cpu_s) / num_between,
    }


def _flags(model: str) -> list[str]:
    engine = shlex.join([sys.executable, str(_FAKE_ENGINE), "--num-blocks", "4096"])
    return ["--model", model, "--engine-command", engine, "--log-level", "warning"]


async def _when_finished(
    redis: Redis, workers: list[Worker], wanted: int, num_requests: int
) -> _Reading:
    """Look until so many requests have ended."""
    while True:
        found = await call(redis, depth(Keys(_QUEUE)))
        num_finished = num_requests - found.queued - found.running
        if num_finished >= wanted:
            break
        await asyncio.sleep(_LOOK_EVERY_S)
    info = await redis.info("cpu")
    pids = [pid for worker in workers for pid in process_tree(worker.process.pid)]
    return _Reading(
        time.perf_counter(),
        num_finished,
        info["used_cpu_user"] + info["used_cpu_sys"],
        sum(map(cpu_s, pids)),
    )
