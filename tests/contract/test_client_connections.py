"""AsyncClient's connections: few, quiet while idle, quick to notice, unharmed by cancellation."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from redis import Redis

from headrace import AsyncClient, TransportError
from headrace.connections import BLOCK_S
from headrace.keys import Keys
from headrace.testing import FakeWorker
from support.client_fixtures import QUICK
from support.queue_driver import TENANT, QueueDriver
from support.servers import Server
from support.tcp_proxy import TcpProxy
from support.waiting import PATIENCE_S, eventually_async


@pytest.fixture
async def async_client(redis_url: str, queue: Keys) -> AsyncIterator[AsyncClient]:
    """Give a client that the test may ask for anything."""
    async with AsyncClient(redis_url, queue=queue.queue, tenant=TENANT, timeout=QUICK) as client:
        yield client


@pytest.fixture
def outsider(client: Redis, queue: Keys) -> QueueDriver:
    """Look at the queue from outside; FakeWorker's token ids are not those the driver checks."""
    return QueueDriver(client, queue)


async def test_five_hundred_streams_share_a_handful_of_connections(
    redis_url: str, queue: Keys, outsider: QueueDriver, redis: redis.asyncio.Redis
) -> None:
    """However many streams are open, the client keeps to max_connections, and serves them all."""
    async with AsyncClient(
        redis_url, queue=queue.queue, timeout=QUICK, max_connections=8
    ) as client:
        assert outsider.depth().queued == 0
        before = len(await redis.client_list())
        asked = [asyncio.create_task(client.generate(f"prompt {i}")) for i in range(500)]
        await eventually_async(lambda: _has_queued(outsider, 500))
        assert len(await redis.client_list()) - before <= 8
        with FakeWorker(redis_url, queue=queue.queue):
            answers = await asyncio.gather(*asked)
    assert [answer.text for answer in answers] == [f"prompt {i}" for i in range(500)]


async def _has_queued(outsider: QueueDriver, num_requests: int) -> bool:
    return outsider.depth().queued == num_requests


async def test_waiting_is_quiet(
    async_client: AsyncClient, outsider: QueueDriver, redis: redis.asyncio.Redis
) -> None:
    """Fifty streams that wait send Redis nothing for as long as they have no reason to doubt."""
    waiting = [
        asyncio.create_task(async_client.generate("Hi", request_id=f"r{i}")) for i in range(50)
    ]
    await eventually_async(lambda: _is_blocked(redis))
    await eventually_async(lambda: _has_queued(outsider, 50))

    async def is_quiet() -> bool:
        before = await _num_commands(redis)
        await asyncio.wait(waiting, timeout=0.4)
        return await _num_commands(redis) - before < 5

    await eventually_async(is_quiet)  # as soon as the last of them has settled
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def _is_blocked(redis: redis.asyncio.Redis) -> bool:
    return int((await redis.info("clients"))["blocked_clients"]) > 0


async def _num_commands(redis: redis.asyncio.Redis) -> int:
    return int((await redis.info("stats"))["total_commands_processed"])


async def _latency_s(client: AsyncClient, outsider: QueueDriver, url: str) -> float:
    """Return the median time of a request while another stream keeps the reader blocked."""
    await client.submit("held", request_id="held")
    outsider.grant("w1")
    times_s = []
    async with client.attach("held"):
        with FakeWorker(url, queue=outsider.keys.queue):
            for _ in range(15):
                began_s = time.monotonic()
                await client.generate("Hi")
                times_s.append(time.monotonic() - began_s)
    return statistics.median(times_s)


async def test_new_stream_is_noticed_at_once(
    async_client: AsyncClient, outsider: QueueDriver, redis_url: str
) -> None:
    """A stream that begins while the reader is blocked on another does not wait for it."""
    assert await _latency_s(async_client, outsider, redis_url) < BLOCK_S / 5


async def test_new_stream_is_noticed_without_permission_to_unblock(
    redis_url: str, outsider: QueueDriver, client: Redis
) -> None:
    """Where Redis refuses CLIENT UNBLOCK, short blocks take its place."""
    commands = ["+@all", "-client|unblock"]
    client.acl_setuser("modest", enabled=True, nopass=True, keys=["*"], commands=commands)
    url = redis_url.replace("unix://", "unix://modest@")
    async with AsyncClient(url, queue=outsider.keys.queue, tenant=TENANT, timeout=QUICK) as modest:
        assert await _latency_s(modest, outsider, redis_url) < BLOCK_S / 5
    client.acl_deluser("modest")


@pytest.fixture
async def narrow_client(server: Server, queue: Keys) -> AsyncIterator[AsyncClient]:
    """Give a client with one connection for calls, and 2 ms more to every reply."""
    async with TcpProxy(server.socket_path) as proxy:
        proxy.delay_s = 0.002
        async with AsyncClient(
            proxy.url, queue=queue.queue, tenant=TENANT, timeout=QUICK, max_connections=2
        ) as client:
            yield client


async def test_cancelled_calls_do_not_mix_up_replies(
    narrow_client: AsyncClient, outsider: QueueDriver
) -> None:
    """After calls that were cancelled at any moment, every reply still belongs to its call."""
    for priority in range(10):
        outsider.enqueue(f"r{priority}", priority=priority)
    for i in range(60):
        call = asyncio.create_task(narrow_client.status(f"r{i % 10}"))
        await asyncio.wait([call], timeout=(i % 12) * 0.0005)
        call.cancel()
        asked = (i + 3) % 10
        assert (await narrow_client.status(f"r{asked}")).priority == asked


async def test_cancellation_is_never_lost(
    narrow_client: AsyncClient, outsider: QueueDriver
) -> None:
    """A task that is cancelled anywhere in a generate ends so, and its request is withdrawn."""
    for i in range(40):
        task = asyncio.create_task(narrow_client.generate("Hi", request_id=f"r{i}"))
        await asyncio.wait([task], timeout=i * 0.0004)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, PATIENCE_S)
    assert outsider.depth().queued == 0


async def test_cancelled_calls_give_their_connections_back(
    narrow_client: AsyncClient, outsider: QueueDriver
) -> None:
    """However many calls were cancelled, the one connection for calls is free afterwards."""
    outsider.enqueue("r1")
    calls = [asyncio.create_task(narrow_client.status("r1")) for _ in range(50)]
    await asyncio.wait(calls, timeout=0.01)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    answers = await asyncio.gather(*(narrow_client.status("r1") for _ in range(20)))
    assert {answer.request_id for answer in answers} == {"r1"}


async def test_closing_ends_open_streams(async_client: AsyncClient) -> None:
    """A stream that is open when its client is closed ends with TransportError."""
    async with async_client.stream("Hi", cancel_on_exit=False) as stream:
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        await async_client.aclose()
        with pytest.raises(TransportError, match="closed"):
            await reading
