"""Both clients while Redis is busy with a script of somebody else's: they wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

import pytest
from redis import Redis

from headrace import RequestState, Timeout, TransportError
from headrace.cli.patient import call
from headrace.connections import ConnectionSettings
from headrace.functions import depth, load_library_sync
from headrace.keys import Keys
from headrace.testing import FakeWorker
from support.any_client import FLAVOURS, AnyClient
from support.busy_server import SOON, kept_busy
from support.client_fixtures import QUICK
from support.queue_driver import QueueDriver
from support.servers import KINDS, Server, binary_of, running_server
from support.tcp_proxy import TcpProxy
from support.waiting import eventually_async

TEXT = "0123456789" * 10
KEYS = Keys("default")


@pytest.fixture(params=KINDS, scope="module")
def hasty(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Give a server that soon says BUSY, Redis and Valkey in turn."""
    if binary_of(request.param) is None:
        pytest.skip(f"{request.param}-server is not installed on this machine")
    with running_server(request.param, SOON) as server:
        with server.connect() as client:
            load_library_sync(client)
        yield server


async def _refusals(server: Server) -> int:
    """Count the calls that the server has refused; it must not be busy."""
    with server.connect() as client:
        stats = client.info("commandstats").get("cmdstat_fcall", {})
        client.config_resetstat()
    return int(stats.get("rejected_calls", 0))


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_submit_waits_until_redis_is_free(flavour: str, hasty: Server) -> None:
    """Nothing ran, so the client asks again, and the request is queued once."""
    async with TcpProxy(hasty.socket_path) as proxy:
        client = AnyClient(flavour, proxy.url, timeout=QUICK)
        await client.submit("Hi", request_id=f"before-{flavour}")  # connects
        await _refusals(hasty)
        with kept_busy(hasty):
            before = proxy.num_refusals
            submitting = asyncio.create_task(client.submit("Hi", request_id=f"busy-{flavour}"))
            await eventually_async(partial(_has_refused, proxy, before))
            assert not submitting.done()
        assert await submitting == f"busy-{flavour}"
        assert await _refusals(hasty) > 0
        assert (await client.status(f"busy-{flavour}")).state is RequestState.QUEUED
        await client.close()


async def _has_refused(proxy: TcpProxy, before: int) -> bool:
    return proxy.num_refusals > before


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_redis_that_stays_busy_is_named(flavour: str, hasty: Server) -> None:
    """When Timeout.redis is over, the error says what Redis said, and that later may do."""
    client = AnyClient(flavour, hasty.url, timeout=Timeout(redis=0.2))
    with kept_busy(hasty), pytest.raises(TransportError, match="BUSY") as caught:
        await client.submit("Hi")
    assert caught.value.retryable_later
    await client.close()


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_stream_outlasts_a_busy_redis(flavour: str, hasty: Server) -> None:
    """Reader and worker both wait, and the stream has every token once."""
    queue = f"stream-{flavour}"
    client = AnyClient(flavour, hasty.url, timeout=QUICK, queue=queue)
    with FakeWorker(hasty.url, queue=queue, token_delay_s=0.002):
        async with client.stream(TEXT) as stream:
            chunks = aiter(stream)
            seen = [(await anext(chunks)).text]
            with kept_busy(hasty):
                rest = asyncio.create_task(_read(chunks))
                await asyncio.wait([rest], timeout=0.3)
            seen += await rest
    assert "".join(seen) == TEXT
    await client.close()


async def _read(chunks: object) -> list[str]:
    return [chunk.text async for chunk in chunks]  # type: ignore[attr-defined]


async def test_a_full_house_is_waited_for(hasty: Server) -> None:
    """With no connection left for it, a client tries again until somebody leaves."""
    with hasty.connect() as driver_client:
        driver = QueueDriver(driver_client, KEYS)
        await eventually_async(partial(_is_alone, driver_client))
        driver_client.config_set("maxclients", 1)
        client = AnyClient("async", hasty.url, timeout=QUICK)
        before = driver_client.info("stats")["rejected_connections"]
        submitting = asyncio.create_task(client.submit("Hi", request_id="crowded"))

        async def was_turned_away() -> bool:
            return bool(driver_client.info("stats")["rejected_connections"] > before)

        await eventually_async(was_turned_away)
        assert not submitting.done()
        driver_client.config_set("maxclients", 1000)
        assert await submitting == "crowded"
        assert driver.status("crowded", tenant="default").state is RequestState.QUEUED
        await client.close()


async def _is_alone(client: Redis) -> bool:
    return int(client.info("clients")["connected_clients"]) == 1


async def test_a_command_waits_until_redis_is_free(hasty: Server) -> None:
    """It asks again for a while, and then says what Redis said."""
    settings = ConnectionSettings(hasty.url, 4)
    async with settings.commands() as connection:
        with kept_busy(hasty):
            asking = asyncio.create_task(call(connection, depth(KEYS)))
            with pytest.raises(TransportError, match="BUSY"):
                await call(connection, depth(KEYS), patience_s=0.2)
            assert not asking.done()
        assert (await asking).running == 0
