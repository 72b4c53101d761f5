"""No wait of a client outlasts its limit, and what befalls one stream leaves the others alone."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from threading import get_ident

import pytest
from redis import Redis

from headrace import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    ProtocolError,
    Timeout,
    TransportError,
)
from headrace.connections import COMMAND_TIMEOUT_S
from headrace.functions import load_library_sync
from headrace.keys import Keys
from headrace.protocol import CHUNK_FIELD
from headrace.testing import FakeWorker
from support.client_fixtures import QUICK
from support.queue_driver import TENANT
from support.servers import Server
from support.waiting import eventually


@pytest.fixture
async def reader(redis_url: str, queue: Keys) -> AsyncIterator[AsyncClient]:
    """Give a client whose streams share one connection."""
    async with AsyncClient(
        redis_url, queue=queue.queue, tenant=TENANT, timeout=QUICK, max_connections=2
    ) as client:
        yield client


@pytest.fixture
def frozen(server: Server, client: Redis) -> Iterator[Server]:
    """Give a server that a test may freeze."""
    load_library_sync(client)
    yield server
    server.resume()


async def test_a_destroyed_log_fails_its_own_stream_only(
    reader: AsyncClient, client: Redis, redis_url: str, queue: Keys
) -> None:
    """Redis answers a read over many logs with one error; the others are read all the same."""
    await reader.submit("Hi", request_id="destroyed")
    client.set(queue.token_log(TENANT, "destroyed"), "no stream", ex=60)
    async with reader.stream("good") as good, reader.attach("destroyed") as destroyed:
        with pytest.raises(TransportError, match="WRONGTYPE"):
            await destroyed.read()
        with FakeWorker(redis_url, queue=queue.queue):
            assert (await good.read()).text == "good"


async def test_an_unreadable_entry_is_not_read_over_and_over(
    reader: AsyncClient, client: Redis, queue: Keys
) -> None:
    """A stream that has failed costs nothing while its caller has not left it yet."""
    await reader.submit("Hi", request_id="broken")
    client.xadd(queue.token_log(TENANT, "broken"), {CHUNK_FIELD: b"\xc1"}, id="1-0")
    async with reader.attach("broken") as broken, reader.stream("other", timeout=QUICK):
        with pytest.raises(ProtocolError):
            await broken.read()
        client.config_resetstat()
        await reader.submit("one more call", request_id="later")
        for _ in range(50):  # time in which a busy loop would read hundreds of times
            await asyncio.to_thread(client.ping)
        assert client.info("commandstats").get("cmdstat_xread", {"calls": 0})["calls"] < 20
    await reader.cancel("broken")
    await reader.cancel("later")


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
async def test_calls_behind_a_hanging_one_do_not_wait_for_each_other(
    redis_url: str, queue: Keys, frozen: Server
) -> None:
    """Twelve calls over one connection to a frozen server all fail in the time of one."""
    limit = Timeout(redis=0.5)
    async with AsyncClient(
        redis_url, queue=queue.queue, timeout=limit, max_connections=2
    ) as client:
        frozen.pause()
        started_s = time.monotonic()
        calls = [client.submit("Hi") for _ in range(12)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        waited_s = time.monotonic() - started_s
        frozen.resume()
    assert {type(outcome) for outcome in outcomes} == {TransportError}
    assert waited_s < 6 * COMMAND_TIMEOUT_S  # one by one it would be twelve


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
async def test_many_answers_do_not_stretch_a_timeout(
    redis_url: str, queue: Keys, frozen: Server
) -> None:
    """With n answers awaited from a frozen server, the last questions take a second in all."""
    limit = Timeout(total=0.5, redis=0.5)
    async with AsyncClient(redis_url, queue=queue.queue, timeout=limit) as client:
        async with client.stream("Hi", n=40, cancel_on_exit=False) as stream:
            frozen.pause()
            started_s = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                await stream.read()
            assert time.monotonic() - started_s < 20.0  # one by one it would be forty
            frozen.resume()
        await client.cancel(stream.request_id)


class TimeIsUp(Exception):
    """What a task runner raises in the thread that works for too long."""


def test_a_time_limit_of_the_caller_ends_the_wait(
    redis_url: str, queue: Keys, client: Redis
) -> None:
    """What a signal handler raises in a blocking read comes out, and the request is cancelled."""

    def stop(_signal: int, _frame: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with Client(redis_url, queue=queue.queue, timeout=QUICK) as reader:
            alarm = threading.Thread(target=_alarm_who_reads, args=(client, get_ident()))
            alarm.start()
            with pytest.raises(TimeIsUp):
                reader.generate("Hi", request_id="r1")
            alarm.join()
            assert reader.status("r1").state == "cancelled"
    finally:
        signal.signal(signal.SIGALRM, before)


def _alarm_who_reads(client: Redis, thread: int) -> None:
    eventually(lambda: client.info("clients")["blocked_clients"] > 0)
    signal.pthread_kill(thread, signal.SIGALRM)


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_a_blocking_client_survives_a_fork(
    redis_url: str, queue: Keys, fake_worker: FakeWorker
) -> None:
    """A server that loads the client and forks its workers has working clients in all of them."""
    with Client(redis_url, queue=queue.queue, timeout=QUICK) as client:
        assert client.generate("before").text == "before"
        child = os.fork()
        if child == 0:
            is_right = False
            try:
                is_right = client.generate("child").text == "child"
            finally:
                os._exit(0 if is_right else 1)
        assert client.generate("parent").text == "parent"
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
