"""What clients want reaches the worker that holds the request, hint or no hint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from headrace.functions import Grant, Held, Wish, WishedEnd
from headrace.keys import Keys
from headrace.types import RequestState
from headrace_worker.transport.connection import Connections
from headrace_worker.transport.control import ControlListener
from headrace_worker.transport.housekeeping import repeat
from support.fake_engine import Misfortune
from support.queue_driver import QueueDriver
from support.streams import Asked, check_stream, enqueue, wait_for_ends
from support.waiting import eventually, eventually_async
from support.worker_fixtures import ON_VALKEY, queue_over
from support.workers import WorkerFarm


class Holder:
    """A worker that holds one request and listens."""

    def __init__(self, connections: Connections, queue: Keys, grant: Grant) -> None:
        self.grant = grant
        self.asked: list[Sequence[Held]] = []
        self.heard: list[Wish] = []
        self._queue = queue_over(connections, queue)
        self.listener = ControlListener(
            connections.blocking, queue, self, held=lambda: [grant.held], on_wish=self.heard.append
        )

    async def wishes(self, held: Sequence[Held]) -> AsyncIterator[Wish]:
        """Ask the queue, and remember what was asked."""
        self.asked.append(held)
        async for wish in self._queue.wishes(held):
            yield wish


@pytest.fixture
def holder(driver: QueueDriver, queue: Keys, connections: Connections) -> Holder:
    """Give the holder of a running request."""
    driver.enqueue("order:42")
    return Holder(connections, queue, driver.grant())


@asynccontextmanager
async def listening(driver: QueueDriver, holder: Holder) -> AsyncIterator[None]:
    """Let the holder listen for hints."""
    running = asyncio.create_task(holder.listener.run())

    async def is_subscribed() -> bool:
        return bool(driver.client.pubsub_numsub(driver.keys.control)[0][1])

    try:
        await eventually_async(is_subscribed)
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@ON_VALKEY
async def test_a_wish_arrives_by_a_hint(driver: QueueDriver, holder: Holder) -> None:
    """The channel names the request, also one whose id has a colon, and the queue says the rest."""

    async def has_heard() -> bool:
        return holder.heard == [Wish(holder.grant.held, WishedEnd.FINISH, 5)]

    async with listening(driver, holder):
        driver.finish_now("order:42")
        await eventually_async(has_heard)


@ON_VALKEY
async def test_a_hint_alone_ends_nothing(driver: QueueDriver, holder: Holder) -> None:
    """Whoever may publish cannot stop the requests of others; hints of others cost no call."""

    async def has_heard() -> bool:
        return bool(holder.heard)

    async with listening(driver, holder):
        for hint in (b"", b"\xff", b"acme", b"acme:other", b"acme:order:42"):
            driver.client.publish(driver.keys.control, hint)
        await eventually_async(has_heard)
    assert holder.asked == [[holder.grant.held]]
    assert [wish.end for wish in holder.heard] == [None]


@ON_VALKEY
async def test_a_wish_whose_hint_was_lost_is_seen_at_the_next_look(
    driver: QueueDriver, holder: Holder
) -> None:
    """Nobody listens, and yet the holder hears of it."""
    driver.cancel("order:42")
    await holder.listener.look_at_all()
    assert [wish.end for wish in holder.heard] == [WishedEnd.CANCEL]


@ON_VALKEY
async def test_what_is_no_longer_ours_has_no_wishes(driver: QueueDriver, holder: Holder) -> None:
    """Another worker holds it; looking costs nothing and says nothing."""
    driver.release(holder.grant)
    driver.cancel("order:42")
    looking = asyncio.create_task(repeat(0.01, holder.listener.look_at_all))

    async def has_looked_twice() -> bool:
        return len(holder.asked) >= 2

    await eventually_async(has_looked_twice)
    looking.cancel()
    assert holder.heard == []


@ON_VALKEY
def test_a_running_request_that_is_put_off_gives_way(driver: QueueDriver, farm: WorkerFarm) -> None:
    """Out of blocks, its sequence is the first to be computed again; both are answered exactly."""
    asked = [
        Asked("r1", max_tokens=110, seed=1),
        Asked("r2", prompt=(5, Misfortune.WAIT, 3), max_tokens=110, seed=2),
    ]
    enqueue(driver, *asked, cost=5)
    worker = farm.start(engine=("--num-blocks", "12", "--step-s", "0.02"))
    eventually(lambda: driver.status("r2").num_tokens > 0)
    assert driver.reprioritise(9, "r1") is RequestState.RUNNING
    farm.open_gate()  # 80 steps before the pool is full
    (event, *_) = worker.wait_for("sequence.preempted")
    assert event["request_id"] == "r1"
    wait_for_ends(driver, *asked)
    for request in asked:
        check_stream(driver, request)


@ON_VALKEY
def test_an_interactive_request_goes_before_batch_work_that_runs(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """Batch work that has the only place gives way, and resumes without loss."""
    batch = Asked("batch", prompt=(5, Misfortune.WAIT, 3), max_tokens=200)
    urgent = Asked("urgent", max_tokens=5, seed=2)
    enqueue(driver, batch, priority=9)
    worker = farm.start("--max-num-seqs", "1", engine=("--step-s", "0.01"))
    eventually(lambda: driver.status("batch").num_tokens > 0)
    enqueue(driver, urgent, priority=0)
    worker.wait_for("request.received", count=2)
    farm.open_gate()
    wait_for_ends(driver, urgent, batch)
    for request in (urgent, batch):
        check_stream(driver, request)
    ends = [e["request_id"] for e in worker.wait_for("request.finished", count=2)]
    assert ends == ["urgent", "batch"]
    assert [e["request_id"] for e in worker.events("sequence.preempted")] == ["batch"]
