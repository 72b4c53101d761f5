"""Throughput and latency through the whole system on one machine, with the demo model.

    make bench BENCH_ARGS="--requests 256"
    .venv/bin/python benchmarks/throughput.py --requests 256 -- --num-threads 2

All requests are enqueued at once, after one that warms up. Output lengths are forced, so every run
does the same work. TTFT counts from enqueue and so contains the queue; the clocks of TTFT and TPOT
are the worker's, that of tokens/s is this process's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from headrace import AsyncClient, Completion, Timeout
from headrace.cli.embedded import embedded_server
from workload import Item, mixed

PATIENCE = Timeout(first_chunk=None, between_chunks=None, total=None)


def main() -> None:
    """Run the workload once and print what was measured."""
    options = _parse()
    with tempfile.TemporaryDirectory() as folder, embedded_server(Path(folder)) as server:
        log = Path(folder) / "worker.log"
        with log.open("wb") as out:
            measured = asyncio.run(_measure(server.url, options, out))
        if measured is None:
            sys.exit(f"the worker ended:\n{log.read_text(errors='replace')}")
    _report(options.model, *measured)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=64, help="how many of the workload")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("worker", nargs="*", help="flags for the worker, after --")
    return parser.parse_args()


async def _measure(
    url: str, options: argparse.Namespace, log: IO[bytes]
) -> tuple[float, list[Completion]] | None:
    """Return the seconds from the first enqueue to the last answer, and the answers.

    None when the worker ends before they are there.
    """
    arguments = ["-m", "headrace_worker", "--redis-url", url, "--model", options.model]
    worker = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, *options.worker, stdout=log, stderr=log
    )
    asking = asyncio.create_task(_ask(url, options.requests))
    watching = asyncio.create_task(worker.wait())
    try:
        await asyncio.wait({asking, watching}, return_when=asyncio.FIRST_COMPLETED)
        return asking.result() if asking.done() else None
    finally:
        asking.cancel()
        if worker.returncode is None:
            worker.terminate()
        await asyncio.wait({asking, watching})


async def _ask(url: str, num_requests: int) -> tuple[float, list[Completion]]:
    *workload, warm_up = mixed(num_requests + 1)  # one more, so that no prefix is cached
    async with AsyncClient(url, timeout=PATIENCE) as client:
        await _generate(client, warm_up)
        start_s = time.perf_counter()
        answers = await asyncio.gather(*(_generate(client, item) for item in workload))
        return time.perf_counter() - start_s, answers


async def _generate(client: AsyncClient, item: Item) -> Completion:
    return await client.generate(
        item.prompt, max_tokens=item.num_output_tokens, ignore_eos=True, temperature=0
    )


def _report(model: str, elapsed_s: float, answers: Sequence[Completion]) -> None:
    num_prompt = sum(answer.usage.prompt_tokens for answer in answers)
    num_output = sum(answer.usage.completion_tokens for answer in answers)
    timings = [answer.timings for answer in answers if answer.timings is not None]
    print(f"machine         {platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}")
    print(f"model           {model}")
    print(f"requests        {len(answers)}, all at once")
    print(f"tokens          {num_prompt} prompt, {num_output} output, in {elapsed_s:.1f} s")
    print(f"output tokens/s {num_output / elapsed_s:.1f}")
    print(f"TTFT            {_percentiles([t.ttft_s for t in timings if t.ttft_s is not None])}")
    print(f"TPOT            {_percentiles([t.tpot_s for t in timings if t.tpot_s is not None])}")


def _percentiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return "nothing measured"
    ordered = sorted(seconds)
    named = {p: ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 90, 99)}
    return ", ".join(f"p{p} {value * 1000:.0f} ms" for p, value in named.items())


if __name__ == "__main__":
    main()
