"""The claim loop: asks while there is room, sleeps while there is nothing, stops when told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.errors import TransportError
from headrace.functions import ClaimReply, Grant, QueueDepth
from headrace_worker.backoff import Backoff
from headrace_worker.serving.claiming import FULL_POLL_S, ClaimLoop
from headrace_worker.serving.ports import Room, RoomIfDisplaced
from support.serving_parts import ScriptedQueue, make_grant
from support.waiting import PATIENCE_S, eventually_async

ROOM = Room(4, 64, 64)
FULL = Room(0, 0, 64, (RoomIfDisplaced(5, 4, 64),))


class SleepyQueue(ScriptedQueue):
    """A queue whose wake-up comes when a test says so, and whose claims can be made to hang."""

    def __init__(self) -> None:
        super().__init__()
        self.has_news = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def claim(self, room: Room) -> ClaimReply:
        await self.may_answer.wait()
        return await super().claim(room)

    async def wait_for_work(self, cursor: str, timeout_s: float) -> None:
        await self.has_news.wait()
        self.has_news.clear()


class Claiming:
    """A claim loop with settable surroundings."""

    def __init__(self, *, exit_when_empty: bool = False) -> None:
        self.queue = SleepyQueue()
        self.room: Room | None = ROOM
        self.is_idle = True
        self.accepted: list[Grant] = []
        self.loop = ClaimLoop(
            self.queue,
            room=lambda: self.room,
            is_idle=lambda: self.is_idle,
            exit_when_empty=exit_when_empty,
            backoff=Backoff(0.001, 0.01),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Run the loop; it must end after the stop."""
        task = asyncio.create_task(self.loop.run(self.accepted.append))
        try:
            yield task
        finally:
            self.loop.stop()
            await asyncio.wait_for(task, PATIENCE_S)

    async def has_claimed(self, times: int) -> None:
        """Return when so many claims were made."""

        async def enough() -> bool:
            return len(self.queue.claims) >= times

        await eventually_async(enough)

    async def rests(self) -> None:
        """Return when every task had several turns."""
        for _ in range(20):
            await asyncio.sleep(0)


async def test_it_claims_on_while_there_are_grants() -> None:
    """Grants are accepted in order, and the next claim follows at once."""
    claiming = Claiming()
    claiming.queue.claim_script = [(make_grant("r1"), make_grant("r2")), (make_grant("r3"),)]
    async with claiming.running():
        await claiming.has_claimed(3)
    assert [grant.request_id for grant in claiming.accepted] == ["r1", "r2", "r3"]


async def test_without_room_nothing_is_claimed() -> None:
    """It sleeps until it is told that room has grown."""
    claiming = Claiming()
    claiming.room = None
    async with claiming.running():
        await claiming.rests()
        assert claiming.queue.claims == []
        claiming.room = ROOM
        claiming.loop.notify()
        await claiming.has_claimed(1)


async def test_an_empty_queue_is_not_asked_again_and_again() -> None:
    """After an answer without grants it waits for news."""
    claiming = Claiming()
    async with claiming.running():
        await claiming.has_claimed(1)
        await claiming.rests()
        assert len(claiming.queue.claims) == 1
        claiming.queue.has_news.set()
        await claiming.has_claimed(2)


async def test_room_that_grows_beyond_the_refused_one_is_worth_a_claim() -> None:
    """Each step of the engine is news; only more room than what brought nothing counts."""
    claiming = Claiming()
    async with claiming.running():
        await claiming.has_claimed(1)
        claiming.room = Room(3, 60, 64)
        claiming.loop.notify()
        await claiming.rests()
        assert len(claiming.queue.claims) == 1
        claiming.room = Room(5, 60, 64)
        claiming.loop.notify()
        await claiming.has_claimed(2)


async def test_a_full_worker_asks_for_those_that_others_give_way_to() -> None:
    """News of a request wake it although nothing is free."""
    claiming = Claiming()
    claiming.room = FULL
    claiming.queue.claim_script = [(), (make_grant("r1"),)]
    async with claiming.running():
        await claiming.has_claimed(1)
        claiming.queue.has_news.set()
        await claiming.has_claimed(3)
    assert [grant.request_id for grant in claiming.accepted] == ["r1"]


async def test_a_full_worker_is_not_kept_busy_by_a_crowd() -> None:
    """News with every turn of the loop bring a claim in a tenth of a second, not in every turn."""
    claiming = Claiming()
    claiming.room = FULL
    started_s = asyncio.get_running_loop().time()
    async with claiming.running():
        for _ in range(1000):
            claiming.queue.has_news.set()
            await asyncio.sleep(0)
        elapsed_s = asyncio.get_running_loop().time() - started_s
        assert 1 <= len(claiming.queue.claims) <= 1 + elapsed_s / FULL_POLL_S


async def test_room_that_grows_ends_the_rest_of_a_full_worker() -> None:
    """A place that becomes free is filled at once."""
    claiming = Claiming()
    claiming.room = FULL
    async with claiming.running():
        await claiming.has_claimed(1)
        claiming.queue.has_news.set()
        await claiming.rests()
        claiming.room = ROOM
        claiming.loop.notify()
        await claiming.rests()
        assert claiming.queue.claims == [FULL, ROOM]


async def test_an_outage_is_waited_out() -> None:
    """While Redis is away it tries again later, and goes on when Redis is back."""
    claiming = Claiming()
    claiming.queue.is_down = True
    claiming.queue.claim_script = [(make_grant("r1"),)]
    async with claiming.running():
        await claiming.rests()
        claiming.queue.is_down = False
        await claiming.has_claimed(1)
    assert [grant.request_id for grant in claiming.accepted] == ["r1"]


async def test_a_failed_wait_for_news_is_an_outage_as_well() -> None:
    """The blocking read breaks: the loop claims again, and nothing is raised."""
    claiming = Claiming()

    async def break_off(cursor: str, timeout_s: float) -> None:
        raise TransportError("Redis: connection reset")

    claiming.queue.wait_for_work = break_off  # type: ignore[method-assign]
    async with claiming.running():
        await claiming.has_claimed(3)


async def test_after_the_stop_nothing_is_claimed() -> None:
    """News and room that come later change nothing."""
    claiming = Claiming()
    async with claiming.running() as task:
        await claiming.has_claimed(1)
        claiming.loop.stop()
        claiming.queue.has_news.set()
        await asyncio.wait_for(task, PATIENCE_S)
    assert len(claiming.queue.claims) == 1


async def test_a_claim_under_way_at_the_stop_is_still_answered() -> None:
    """Its grants reach the ledger, from which they are handed back, instead of being orphaned."""
    claiming = Claiming()
    claiming.queue.may_answer.clear()
    claiming.queue.claim_script = [(make_grant("r1"),)]
    async with claiming.running():
        await claiming.rests()
        claiming.loop.stop()
        await claiming.rests()
        claiming.queue.may_answer.set()
    assert [grant.request_id for grant in claiming.accepted] == ["r1"]


async def test_a_claim_that_is_never_answered_does_not_hold_up_the_stop() -> None:
    """The worker has to leave in time; leases bring such grants back."""
    claiming = Claiming()
    claiming.queue.may_answer.clear()
    async with claiming.running():
        await claiming.rests()
    assert claiming.accepted == []


async def test_it_ends_when_queue_and_ledger_are_empty() -> None:
    """With exit_when_empty, true counts of zero end it."""
    claiming = Claiming(exit_when_empty=True)
    await asyncio.wait_for(claiming.loop.run(claiming.accepted.append), PATIENCE_S)
    assert len(claiming.queue.claims) == 1


async def test_it_stays_while_others_hold_requests() -> None:
    """They may come back, so it asks again until the counts are zero."""
    claiming = Claiming(exit_when_empty=True)
    claiming.queue.depths = [QueueDepth(0, 1, 0), QueueDepth(1, 0, 0)]
    async with claiming.running() as task:
        for turn in range(1, 3):
            await claiming.has_claimed(turn)
            claiming.queue.has_news.set()
        await asyncio.wait_for(task, PATIENCE_S)
    assert len(claiming.queue.claims) == 3


async def test_it_looks_again_when_the_last_request_has_left() -> None:
    """Busy at the empty answer, idle later: that is the moment to ask whether all is done."""
    claiming = Claiming(exit_when_empty=True)
    claiming.is_idle = False
    async with claiming.running() as task:
        await claiming.has_claimed(1)
        await claiming.rests()
        claiming.is_idle = True
        claiming.loop.notify()
        await asyncio.wait_for(task, PATIENCE_S)
    assert len(claiming.queue.claims) == 2
