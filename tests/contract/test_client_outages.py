"""What both clients do while Redis is away, cuts connections, loses replies, or says nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from redis import Redis

from headrace import RequestState, RequestTimeout, Timeout, TransportError
from headrace.keys import Keys
from headrace.testing import FakeWorker
from support.any_client import AnyClient
from support.client_fixtures import QUICK, Connect
from support.queue_driver import QueueDriver
from support.servers import KINDS, Server, binary_of, running_server
from support.tcp_proxy import TcpProxy
from support.waiting import PATIENCE_S

TEXT = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[TcpProxy]:
    """Stand between the client and the server; the worker goes straight to the server."""
    async with TcpProxy(server.socket_path) as proxy:
        yield proxy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flavour", ["async", "sync"])
async def test_stream_survives_a_restart(flavour: str, kind: str) -> None:
    """A stream that is open while Redis is killed and comes back has every token once."""
    if binary_of(kind) is None:
        pytest.skip(f"{kind}-server is not installed on this machine")
    with running_server(kind, {"appendonly": "yes", "appendfsync": "always"}) as server:
        client = AnyClient(flavour, server.url, timeout=QUICK)
        with FakeWorker(server.url, token_delay_s=0.002):
            async with client.stream(TEXT) as stream:
                chunks = aiter(stream)
                seen = [(await anext(chunks)).text]
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
                seen += [chunk.text async for chunk in chunks]
        await client.close()
    assert "".join(seen) == TEXT


async def test_stream_survives_connections_that_are_cut(
    connect: Connect, proxy: TcpProxy, redis_url: str, queue: Keys
) -> None:
    """Five resets of every connection while a stream is read cost it no token, and double none."""
    client = connect(proxy.url)
    seen = []
    with FakeWorker(redis_url, queue=queue.queue, token_delay_s=0.002):
        async with client.stream(TEXT) as stream:
            async for chunk in stream:
                seen.append(chunk.text)
                if len(seen) in (10, 40, 70, 100, 130):
                    proxy.reset_all()
    assert "".join(seen) == TEXT


async def test_lost_replies_queue_a_request_once(
    connect: Connect, proxy: TcpProxy, driver: QueueDriver
) -> None:
    """A submit whose reply is lost five times is one request."""
    client = connect(proxy.url)
    proxy.lose_replies(b"headrace_1_enqueue", times=5)
    await client.submit("Hi")
    assert proxy.num_swallowed == 5
    assert driver.depth().queued == 1


async def test_idle_connections_that_were_closed_are_replaced(
    any_client: AnyClient, fake_worker: FakeWorker, client: Redis
) -> None:
    """A client whose connections were all closed while it was idle goes on without an error."""
    await any_client.generate("before")
    for _ in range(3):
        client.client_kill_filter(_type="normal", skipme=True)
        assert (await any_client.generate("after")).text == "after"


async def test_absent_redis_is_reported_in_time(connect: Connect, tmp_path: object) -> None:
    """Without Redis a call tries for the time that Timeout.redis allows, then says why."""
    client = connect(f"unix://{tmp_path}/nobody.sock", timeout=Timeout(redis=0.3))
    began_s = time.monotonic()
    with pytest.raises(TransportError) as caught:
        await client.submit("Hi")
    assert caught.value.__cause__ is not None
    assert time.monotonic() - began_s < 10.0  # which is what it would be without the limit


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
async def test_silent_network_ends_by_the_timeout(
    connect: Connect, proxy: TcpProxy, driver: QueueDriver
) -> None:
    """When a network swallows everything, a stream ends by its timeout; it never hangs."""
    client = connect(proxy.url, timeout=Timeout(total=0.5))
    began_s = time.monotonic()
    async with client.stream("Hi", request_id="r1", cancel_on_exit=False) as stream:
        proxy.is_silent = True
        with pytest.raises(RequestTimeout):
            await stream.read()
    assert time.monotonic() - began_s < PATIENCE_S
    assert driver.status().state is RequestState.QUEUED


async def test_wrong_password_is_an_error_not_a_wait(
    connect: Connect, client: Redis, redis_url: str
) -> None:
    """What trying again cannot heal is raised at once."""
    client.acl_setuser("stranger", enabled=True, passwords=["+right"], commands=["+ping"])
    url = redis_url.replace("unix://", "unix://stranger:wrong@")
    stranger = connect(url, timeout=Timeout(redis=600.0))
    began_s = time.monotonic()
    with pytest.raises(TransportError):
        await stranger.submit("Hi")
    assert time.monotonic() - began_s < PATIENCE_S
    client.acl_deluser("stranger")


async def test_reader_without_permission_is_told(
    connect: Connect, client: Redis, redis_url: str
) -> None:
    """A user that may enqueue but not read gets an error from its stream."""
    client.acl_setuser(
        "writer", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-xread"]
    )
    writer = connect(redis_url.replace("unix://", "unix://writer@"))
    with pytest.raises(TransportError, match="xread"):
        await writer.generate("Hi")
    client.acl_deluser("writer")


async def test_closed_client_says_so(connect: Connect) -> None:
    """Calls on a closed client raise at once."""
    client = connect()
    await client.close()
    with pytest.raises(TransportError, match="closed"):
        await client.submit("Hi")
