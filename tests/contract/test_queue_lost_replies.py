"""Every call may be sent again: what a lost reply hides has happened once."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from headrace import functions
from headrace.errors import TransportError
from headrace.functions import (
    Call,
    EmitOutcome,
    EnqueueOutcome,
    FinishOutcome,
    T,
    load_library,
    run,
)
from headrace.keys import Keys
from headrace.protocol import TerminalMessage, encode_terminal
from headrace.types import FinishReason, RequestState
from support.queue_driver import QueueDriver, chunk_of
from support.servers import Server
from support.tcp_proxy import TcpProxy

MOST_LOST = 10


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[TcpProxy]:
    """Stand between a client and the server."""
    async with TcpProxy(server.socket_path) as proxy:
        yield proxy


@pytest.fixture
async def retrying(proxy: TcpProxy) -> AsyncIterator[Redis]:
    """Give a client that sends a call again when the connection ends, as redis-py does."""
    retry = Retry(NoBackoff(), MOST_LOST + 1)
    async with Redis(host="127.0.0.1", port=proxy.port, retry=retry) as client:
        await load_library(client)
        yield client


async def _run_losing(proxy: TcpProxy, redis: Redis, call: Call[T], times: int) -> T:
    """Run a call whose first replies are lost, and see that they were."""
    before = proxy.num_swallowed
    proxy.lose_replies(f"headrace_1_{call.function}".encode(), times)
    result = await run(redis, call)
    assert proxy.num_swallowed - before == times
    return result


@pytest.mark.parametrize("times", [1, MOST_LOST])
async def test_a_request_survives_the_loss_of_every_reply(
    proxy: TcpProxy, retrying: Redis, driver: QueueDriver, queue: Keys, times: int
) -> None:
    """However often each reply is lost: one request, one grant, each token once, one end."""
    enqueue = functions.enqueue(
        queue,
        tenant="acme",
        request_id="r1",
        payload=b"x",
        cost=10,
        priority=5,
        result_ttl_ms=60_000,
    )
    reply = await _run_losing(proxy, retrying, enqueue, times)
    assert reply.outcome is EnqueueOutcome.DUPLICATE  # the call whose reply was lost had queued it
    claim = functions.claim(
        queue,
        worker_id="w1",
        nonce="n1",
        free_seqs=8,
        free_tokens=1000,
        total_tokens=1000,
        lease_ms=60_000,
    )
    (grant,) = (await _run_losing(proxy, retrying, claim, times)).grants
    assert grant.epoch == 1
    for offset in (0, 3):
        emit = functions.emit(queue, worker_id="w1", items=[chunk_of(grant, offset, 3)])
        (emitted,) = await _run_losing(proxy, retrying, emit, times)
        assert (emitted.outcome, emitted.offset) == (EmitOutcome.OK, offset + 3)
    finish = functions.finish(
        queue,
        worker_id="w1",
        tenant="acme",
        request_id="r1",
        epoch=1,
        num_tokens=6,
        state=RequestState.FINISHED,
        terminal=encode_terminal(TerminalMessage(FinishReason.STOP)),
        finish_reason="stop",
    )
    finished = await _run_losing(proxy, retrying, finish, times)
    assert finished.outcome is FinishOutcome.OK
    assert driver.tokens() == [0, 1, 2, 3, 4, 5]
    assert driver.end().finish_reason is FinishReason.STOP


async def test_a_lost_release_gives_one_strike(
    proxy: TcpProxy, retrying: Redis, driver: QueueDriver, queue: Keys
) -> None:
    """The repetition finds the request handed back already."""
    driver.enqueue()
    grant = driver.grant()
    release = functions.release(queue, worker_id="w1", held=[grant.held], strike=True)
    assert await _run_losing(proxy, retrying, release, 3) == 0
    assert (driver.status().strikes, driver.depth().queued) == (1, 1)


async def test_a_lost_cancel_is_answered_with_the_state(
    proxy: TcpProxy, retrying: Redis, driver: QueueDriver, queue: Keys
) -> None:
    """The repetition sees what the first did."""
    driver.enqueue()
    cancel = functions.cancel(queue, tenant="acme", request_id="r1")
    assert await _run_losing(proxy, retrying, cancel, 3) is RequestState.CANCELLED
    assert len(driver.log()) == 1


async def test_plain_appends_through_a_retrying_client_are_doubled(
    proxy: TcpProxy, retrying: Redis, queue: Keys
) -> None:
    """The same losses double a raw XADD: the proxy does lose replies, and functions are needed."""
    for number in range(20):
        proxy.lose_replies(b"XADD")
        await retrying.xadd(queue.wake, {"number": number})
    assert await retrying.xlen(queue.wake) == 40


async def test_a_client_that_gives_up_is_told_to_come_back(
    proxy: TcpProxy, driver: QueueDriver, queue: Keys
) -> None:
    """Without retries, a lost reply is a TransportError that says "later"; later it is known."""
    async with Redis(host="127.0.0.1", port=proxy.port, retry=Retry(NoBackoff(), 0)) as redis:
        driver.enqueue()
        proxy.lose_replies(b"headrace_1_cancel")
        call = functions.cancel(queue, tenant="acme", request_id="r1")
        with pytest.raises(TransportError) as failure:
            await run(redis, call)
        assert failure.value.retryable_later
        assert await run(redis, call) is RequestState.CANCELLED


async def test_a_reset_connection_is_replaced(
    proxy: TcpProxy, retrying: Redis, driver: QueueDriver, queue: Keys
) -> None:
    """After a TCP reset the next call opens a new connection and succeeds."""
    connections = proxy.num_connections
    proxy.reset_all()
    assert (await run(retrying, functions.depth(queue))).queued == 0
    assert proxy.num_connections == connections + 1
