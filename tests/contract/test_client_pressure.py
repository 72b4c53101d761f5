"""Both clients when Redis is full or frozen, and Client among threads."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from redis import Redis

from headrace import Client, Timeout, TransportError
from headrace.functions import load_library_sync
from headrace.keys import Keys
from headrace.testing import FakeWorker
from support.any_client import AnyClient
from support.client_fixtures import QUICK, Connect
from support.servers import Server
from support.waiting import PATIENCE_S, eventually_async


@pytest.fixture
def full(client: Redis) -> Redis:
    """Make the server refuse everything that needs memory; the test makes room again."""
    load_library_sync(client)
    client.config_set("maxmemory", 1)
    return client


async def _num_refused(client: Redis) -> int:
    stats = client.info("commandstats").get("cmdstat_fcall", {})
    return int(stats.get("rejected_calls", 0)) + int(stats.get("failed_calls", 0))


async def test_submit_waits_for_memory(any_client: AnyClient, full: Redis) -> None:
    """A full Redis is a matter of time: the request is queued when there is room again."""
    full.config_resetstat()
    submitting = asyncio.create_task(any_client.submit("Hi", request_id="r1"))
    await eventually_async(lambda: _num_refused(full))
    full.config_set("maxmemory", 0)
    assert await submitting == "r1"


async def test_lasting_lack_of_memory_is_reported(connect: Connect, full: Redis) -> None:
    """When there is no room for as long as Timeout.redis, the error says what Redis said."""
    client = connect(timeout=Timeout(redis=0.2))
    with pytest.raises(TransportError, match=r"OOM|maxmemory") as caught:
        await client.submit("Hi")
    full.config_set("maxmemory", 0)
    assert caught.value.retryable_later


async def test_stream_outlasts_a_frozen_server(
    connect: Connect, server: Server, redis_url: str, queue: Keys
) -> None:
    """A server that stands still for a while costs its streams time, and nothing else."""
    client = connect()
    text = "0123456789" * 10
    with FakeWorker(redis_url, queue=queue.queue, token_delay_s=0.002):
        async with client.stream(text) as stream:
            chunks = aiter(stream)
            seen = [(await anext(chunks)).text]
            server.pause()
            rest = asyncio.create_task(_read(chunks))
            await asyncio.wait([rest], timeout=0.3)
            server.resume()
            seen += await rest
    assert "".join(seen) == text


async def _read(chunks: object) -> list[str]:
    return [chunk.text async for chunk in chunks]  # type: ignore[attr-defined]


@pytest.fixture
def shared(redis_url: str, queue: Keys, fake_worker: FakeWorker) -> Client:
    """Give a blocking client with fewer connections than its threads."""
    return Client(redis_url, queue=queue.queue, timeout=QUICK, max_connections=6)


def test_threads_share_a_client(shared: Client) -> None:
    """Twenty threads with six connections between them each get their own answers."""

    def ask(i: int) -> str:
        return shared.generate(f"prompt {i}").text

    with shared, ThreadPoolExecutor(20) as threads:
        assert list(threads.map(ask, range(100))) == [f"prompt {i}" for i in range(100)]


def test_thread_that_closes_wakes_the_others(redis_url: str, queue: Keys) -> None:
    """A thread that waits for chunks learns that another one has closed the client."""
    client = Client(redis_url, queue=queue.queue, timeout=QUICK)
    has_opened, errors = threading.Event(), []

    def read() -> None:
        try:
            with client.stream("Hi", cancel_on_exit=False) as stream:
                has_opened.set()
                stream.read()
        except TransportError as error:
            errors.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    assert has_opened.wait(PATIENCE_S)
    client.close()
    reader.join(PATIENCE_S)
    assert len(errors) == 1
