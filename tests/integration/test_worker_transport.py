"""The transport against real servers: what it refuses, what it repeats, and what it says."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
import structlog

from headrace.errors import TransportError
from headrace.functions import Held, WishedEnd
from headrace.keys import Keys
from headrace.types import RequestState
from headrace_worker.serving.ports import Room
from headrace_worker.transport.connection import Connections
from headrace_worker.transport.housekeeping import Housekeeper, repeat
from headrace_worker.transport.link import Link
from headrace_worker.transport.queue import HELD_A_CALL
from support.queue_driver import QueueDriver
from support.servers import Server
from support.tcp_proxy import TcpProxy
from support.waiting import PATIENCE_S, eventually_async
from support.worker_fixtures import ON_VALKEY, queue_over
from support.workers import LEASE_S

ROOM = Room(free_seqs=2, free_tokens=100, total_tokens=100)


async def test_a_claim_whose_reply_was_lost_gets_the_same_grants(
    driver: QueueDriver, queue: Keys, server: Server
) -> None:
    """Nothing is orphaned: the next claim, with other room, returns what the first was granted."""
    for number in range(4):
        driver.enqueue(f"r{number}")
    async with (
        TcpProxy(server.socket_path) as proxy,
        Connections(proxy.url, LEASE_S) as connections,
    ):
        remote = queue_over(connections, queue)
        await remote.depth()
        proxy.lose_replies(b"headrace_1_claim")
        with pytest.raises(TransportError):
            await remote.claim(ROOM)
        again = await remote.claim(Room(free_seqs=4, free_tokens=1, total_tokens=100))
        assert [grant.request_id for grant in again.grants] == ["r0", "r1"]
        following = await remote.claim(ROOM)
        assert [grant.request_id for grant in following.grants] == ["r2", "r3"]


async def test_an_enqueue_wakes_whoever_waits(
    driver: QueueDriver, queue: Keys, connections: Connections
) -> None:
    """The wait ends with the news, long before its time is over."""
    remote = queue_over(connections, queue)
    cursor = (await remote.claim(ROOM)).wake_cursor
    waiting = asyncio.create_task(remote.wait_for_work(cursor, timeout_s=600))
    await asyncio.sleep(0)
    await asyncio.to_thread(driver.enqueue)
    await asyncio.wait_for(waiting, PATIENCE_S)


@ON_VALKEY
async def test_released_requests_come_back_with_a_strike_or_without(
    driver: QueueDriver, queue: Keys, connections: Connections
) -> None:
    """The strike is for an engine that died, not for a worker that leaves."""
    remote = queue_over(connections, queue)
    driver.enqueue("r1")
    for expected, strike in ((0, False), (1, True)):
        (grant,) = (await remote.claim(ROOM)).grants
        assert await remote.release([grant.held], strike=strike) == 1
        status = await remote.status(grant.held)
        assert status is not None
        assert (status.state, status.strikes) == (RequestState.QUEUED, expected)
    (grant,) = (await remote.claim(ROOM)).grants
    await remote.release([grant.held], strike=False)


@ON_VALKEY
async def test_a_renewal_names_what_is_lost(
    driver: QueueDriver, queue: Keys, connections: Connections
) -> None:
    """A request that is held stays, one of an old epoch is lost."""
    remote = queue_over(connections, queue)
    driver.enqueue("r1")
    (grant,) = (await remote.claim(ROOM)).grants
    old = Held(grant.tenant, grant.request_id, grant.epoch - 1 or 7)
    assert await remote.renew([grant.held, old]) == (old,)


@ON_VALKEY
async def test_what_is_held_is_renewed_and_handed_back_in_bites(
    driver: QueueDriver, queue: Keys, connections: Connections
) -> None:
    """No call looks at more than so many, together they answer for all; a death is told at once."""
    remote = queue_over(connections, queue)
    num_held = 2 * HELD_A_CALL
    for number in range(num_held):
        driver.enqueue(f"r{number}")
    room = Room(free_seqs=num_held, free_tokens=10**6, total_tokens=10**6)
    grants = [*(await remote.claim(room)).grants, *(await remote.claim(room)).grants]
    held, old = [grant.held for grant in grants], Held("acme", "r0", 7)
    driver.client.config_resetstat()
    assert await remote.renew([*held, old]) == (old,)
    assert num_calls(driver) == 3
    assert await remote.release(held, strike=True, cause="killed") == num_held
    assert num_calls(driver) == 4


@ON_VALKEY
async def test_wishes_are_asked_for_in_bites(
    driver: QueueDriver, queue: Keys, connections: Connections
) -> None:
    """No call looks at more than so many, and what one tells is heard before the next is made."""
    remote = queue_over(connections, queue)
    for number in range(HELD_A_CALL + 1):
        driver.enqueue(f"r{number}")
    room = Room(free_seqs=HELD_A_CALL + 1, free_tokens=10**6, total_tokens=10**6)
    grants = [*(await remote.claim(room)).grants, *(await remote.claim(room)).grants]
    driver.cancel(grants[-1].request_id)
    driver.client.config_resetstat()
    told, calls = [], []
    async for wish in remote.wishes([grant.held for grant in grants]):
        told.append(wish)
        calls.append(driver.client.info("commandstats")["cmdstat_fcall_ro"]["calls"])
    assert [wish.held for wish in told] == [grant.held for grant in grants]
    assert [wish.end for wish in told] == [*[None] * HELD_A_CALL, WishedEnd.CANCEL]
    assert calls == [*[1] * HELD_A_CALL, 2]
    assert [wish async for wish in remote.wishes([])] == []


def num_calls(driver: QueueDriver) -> int:
    """Return how many functions have been called."""
    return int(driver.client.info("commandstats")["cmdstat_fcall"]["calls"])


@ON_VALKEY
async def test_a_sweep_tells_whom_it_buried(
    driver: QueueDriver, queue: Keys, connections: Connections
) -> None:
    """A request whose holders vanished, the last one alone with it, is logged as a dead letter."""
    housekeeper = Housekeeper(
        Link(connections.commands, connections.command_timeout_s),
        queue,
        worker_id="w1",
        lease_s=0.001,
        max_strikes=2,
    )

    async def is_taken_back() -> bool:
        await housekeeper.reap()
        return driver.status("r1").state is not RequestState.RUNNING

    driver.enqueue("r1")
    with structlog.testing.capture_logs() as events:
        for _ in range(2):
            driver.grant("vanished", max_strikes=2, lease_ms=1)
            await eventually_async(is_taken_back)
    assert [(e["event"], e["request_id"]) for e in events] == [("request.dead_lettered", "r1")]
    driver.client.flushall()


@ON_VALKEY
async def test_an_outage_is_logged_once_each_way(queue: Keys, server: Server) -> None:
    """However many calls fail, one line tells that Redis is gone and one that it is back."""
    async with TcpProxy(server.socket_path) as proxy, Connections(proxy.url, LEASE_S) as links:
        remote = queue_over(links, queue)
        with structlog.testing.capture_logs() as events:
            await remote.depth()
            proxy.lose_replies(b"headrace_1_depth", times=3)
            for _ in range(3):
                with pytest.raises(TransportError):
                    await remote.depth()
            await remote.depth()
            await remote.depth()
    assert [event["event"] for event in events] == ["redis.disconnected", "redis.reconnected"]


@ON_VALKEY
async def test_full_memory_is_one_outage_although_renewals_succeed(
    driver: QueueDriver, queue: Keys, connections: Connections
) -> None:
    """What Redis refuses and what it grants take turns, and the log stays quiet about it."""
    remote = queue_over(connections, queue)
    driver.enqueue("r1")
    (grant,) = (await remote.claim(ROOM)).grants
    with structlog.testing.capture_logs() as events:
        driver.client.config_set("maxmemory", "1")
        try:
            for _ in range(3):
                with pytest.raises(TransportError):
                    await remote.claim(ROOM)
                assert await remote.renew([grant.held]) == ()
        finally:
            driver.client.config_set("maxmemory", "0")
        await remote.claim(ROOM)
    assert [event["event"] for event in events] == ["redis.disconnected", "redis.reconnected"]


async def test_chores_go_on_after_a_failure() -> None:
    """A chore that Redis refuses is done again at its next turn."""
    turns = 0

    async def fail_once() -> None:
        nonlocal turns
        turns += 1
        if turns == 1:
            raise TransportError("Redis: down")

    async def twice() -> bool:
        return turns >= 2

    running = asyncio.create_task(repeat(0.001, fail_once))
    try:
        await eventually_async(twice)
    finally:
        running.cancel()


@ON_VALKEY
async def test_no_cancellation_is_lost_in_a_call(queue: Keys, connections: Connections) -> None:
    """A task that calls without end stops when it is told to, at whatever await it stands."""
    remote = queue_over(connections, queue)

    async def call_for_ever() -> None:
        while True:
            await remote.depth()

    for turn in range(300):
        task = asyncio.create_task(call_for_ever())
        for _ in range(turn % 23):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=PATIENCE_S)
        assert done, f"turn {turn} goes on"
        assert task.cancelled()
    assert (await remote.depth()).queued == 0


@ON_VALKEY
async def test_a_read_that_waits_gives_up_on_a_silent_server(queue: Keys, server: Server) -> None:
    """A partition without a reset ends the wait for work as an error, soon after its time."""
    async with TcpProxy(server.socket_path) as proxy, Connections(proxy.url, 0.4) as connections:
        remote = queue_over(connections, queue)

        async def is_answered() -> bool:
            with suppress(TransportError):  # of a busy machine
                await remote.wait_for_work("$", 0.01)
                return True
            return False

        await eventually_async(is_answered)
        proxy.is_silent = True
        with pytest.raises(TransportError):
            await asyncio.wait_for(remote.wait_for_work("$", 0.1), PATIENCE_S)


@ON_VALKEY
async def test_a_lane_of_the_wrong_type_is_logged_once(
    driver: QueueDriver, queue: Keys, connections: Connections
) -> None:
    """However often it is passed over, one line names its key."""
    driver.enqueue("stuck", tenant="broken")
    lane = queue.lane(5, "broken")
    driver.client.set(lane, "no stream")
    remote = queue_over(connections, queue)
    with structlog.testing.capture_logs() as events:
        for _ in range(3):
            assert (await remote.claim(ROOM)).grants == ()
    assert [(event["event"], event["key"]) for event in events] == [("lane.skipped", lane)]
    driver.client.delete(lane)
    driver.janitor()
    assert [grant.request_id for grant in (await remote.claim(ROOM)).grants] == ["stuck"]
