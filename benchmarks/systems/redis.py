"""The whole system: this process produces, a worker answers, a Valkey of its own is between them.

python -m benchmarks.systems.redis JOB RESULT [--workers N] [--bulk]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from contextlib import AsyncExitStack, ExitStack
from importlib.metadata import version
from pathlib import Path

from benchmarks.job import Job, Result, TokenTimes, run_as_child, summarize
from benchmarks.memory import PeakMemory, cpu_s
from benchmarks.systems.flags import worker_flags
from benchmarks.systems.queue_run import PATIENCE, Worker, ask_all, ask_in_bulk, running_workers
from headrace import AsyncClient
from headrace.cli.embedded import embedded_server


def main() -> None:
    """Run one job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--bulk", action="store_true", help="nobody streams")
    given = parser.parse_args()
    run_as_child(given.files, lambda job: measure(job, given.workers, in_bulk=given.bulk))


def measure(job: Job, num_workers: int = 1, *, in_bulk: bool = False) -> Result:
    """Start server and workers, warm up, run the workload; memory is that of the workers."""
    with tempfile.TemporaryDirectory() as name, embedded_server(Path(name)) as server:
        return asyncio.run(_measure(job, server.url, Path(name), num_workers, in_bulk))


async def _measure(job: Job, url: str, folder: Path, num_workers: int, in_bulk: bool) -> Result:
    async with AsyncExitStack() as stack:
        flags = [*worker_flags(job), "--log-level", "warning"]
        workers = await stack.enter_async_context(running_workers(url, flags, folder, num_workers))
        client = await stack.enter_async_context(AsyncClient(url, timeout=PATIENCE))
        await ask_all(client, job.warm_up)
        before_s = [cpu_s(worker.process.pid) for worker in workers]
        elapsed_s, times, peak_bytes = await _ask_and_watch(client, job, workers, in_bulk)
        transport_s = sum(cpu_s(worker.process.pid) for worker in workers) - sum(before_s)
    return summarize(
        job,
        times,
        system="through Redis, in bulk" if in_bulk else "through Redis",
        version=f"torch {version('torch')}",
        elapsed_s=elapsed_s,
        peak_rss_bytes=peak_bytes,
        details={"num_workers": num_workers, "transport_cpu_s": transport_s},
    )


async def _ask_and_watch(
    client: AsyncClient, job: Job, workers: list[Worker], in_bulk: bool
) -> tuple[float, list[TokenTimes], int]:
    with ExitStack() as stack:
        watches = [stack.enter_context(PeakMemory(worker.process.pid)) for worker in workers]
        if in_bulk:
            elapsed_s, times = await ask_in_bulk(client, job.items)
        else:
            elapsed_s, times = await ask_all(client, job.items, is_sequential=job.is_sequential)
    return elapsed_s, times, sum(watch.peak_bytes for watch in watches)


if __name__ == "__main__":
    main()
