"""One run through Redis: producers enqueue and read, workers of our own claim and answer.

The caller's process is the producer. It counts with a clock of its own: a request has arrived when
it is sent, and a token has come when its chunk is here.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.job import TokenTimes
from benchmarks.workload import Item
from headrace import AsyncClient, Timeout
from headrace.options import PromptWithOptions

PATIENCE = Timeout(first_chunk=None, between_chunks=None, total=None)
_STOP_TIMEOUT_S = 20.0


class WorkerEnded(RuntimeError):
    """A worker ended while requests were under way; the message is the end of its log."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker's process and where it logs."""

    process: asyncio.subprocess.Process
    log: Path


@asynccontextmanager
async def running_workers(
    url: str, flags: Sequence[str], folder: Path, num_workers: int = 1
) -> AsyncIterator[list[Worker]]:
    """Run workers of one queue; raises WorkerEnded into the block when one of them ends."""
    workers = [await _start(url, flags, folder / f"worker-{n}.log") for n in range(num_workers)]
    watches = _cancel_this_task_when_one_ends(workers)
    try:
        yield workers
    except asyncio.CancelledError:
        if ended := [worker for worker in workers if worker.process.returncode is not None]:
            raise WorkerEnded(ended[0].log.read_text("utf-8", "replace")[-2000:]) from None
        raise
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*map(_stop, workers))


async def ask_all(
    client: AsyncClient, items: Sequence[Item], *, is_sequential: bool = False
) -> tuple[float, list[TokenTimes]]:
    """Send every item when it arrives and read its answer; return the seconds and the times."""
    start_s = time.perf_counter()
    if is_sequential:
        times = [await _ask(client, item, time.perf_counter()) for item in items]
    else:
        asks = (_ask(client, item, start_s + item.arrival_s) for item in items)
        times = list(await asyncio.gather(*asks))
    return time.perf_counter() - start_s, times


async def ask_in_bulk(client: AsyncClient, items: Sequence[Item]) -> tuple[float, list[TokenTimes]]:
    """Send all items by generate_many; the times of their tokens are those that the worker saw."""
    times = [TokenTimes(0.0) for _ in items]
    prompts: list[PromptWithOptions] = [
        {"prompt": item.prompt, "max_tokens": item.num_output_tokens, "metadata": {"place": place}}
        for place, item in enumerate(items)
    ]
    start_s = time.perf_counter()
    async for answer in client.generate_many(
        prompts, max_in_flight=len(items), ignore_eos=True, temperature=0
    ):
        assert answer.timings is not None
        seen = times[answer.metadata["place"]]
        seen.first_s, seen.last_s = answer.timings.ttft_s, answer.timings.e2e_s
        seen.num_tokens = answer.usage.completion_tokens
    return time.perf_counter() - start_s, times


async def _ask(client: AsyncClient, item: Item, at_s: float) -> TokenTimes:
    await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
    times = TokenTimes(at_s)
    async with client.stream(
        item.prompt, max_tokens=item.num_output_tokens, ignore_eos=True, temperature=0
    ) as stream:
        async for chunk in stream:
            times.saw(time.perf_counter(), len(chunk.token_ids))
    return times


def _cancel_this_task_when_one_ends(workers: Sequence[Worker]) -> list[asyncio.Task[int]]:
    block = asyncio.current_task()
    assert block is not None

    def give_up(watch: asyncio.Task[int]) -> None:
        if not watch.cancelled():
            block.cancel()

    watches = [asyncio.create_task(worker.process.wait()) for worker in workers]
    for watch in watches:
        watch.add_done_callback(give_up)
    return watches


async def _start(url: str, flags: Sequence[str], log: Path) -> Worker:
    command = [sys.executable, "-m", "headrace_worker", "--redis-url", url, *flags]
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out)
    return Worker(process, log)


async def _stop(worker: Worker) -> None:
    if worker.process.returncode is None:
        worker.process.terminate()
        try:
            await asyncio.wait_for(worker.process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            worker.process.kill()
            await worker.process.wait()
