"""Running calls: the library is loaded when it is missing, and refusals are told from failures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis.asyncio
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from headrace import functions
from headrace.errors import TransportError
from headrace.functions import EmitOutcome, FinishOutcome, load_library, load_library_sync, run
from headrace.keys import Keys
from headrace.types import RequestState
from support.queue_driver import QueueDriver
from support.servers import Server, running_server
from support.waiting import eventually

NO_RETRY = Retry(NoBackoff(), 0)


async def test_a_missing_library_is_loaded(
    redis: redis.asyncio.Redis, client: Redis, queue: Keys
) -> None:
    """A server that forgot its functions gets them with the first call, from either client."""
    client.function_flush()
    assert (await run(redis, functions.depth(queue))).queued == 0
    client.function_flush()
    assert functions.run_sync(client, functions.depth(queue)).queued == 0


async def test_loading_replaces_an_older_release(redis: redis.asyncio.Redis, client: Redis) -> None:
    """What a worker does at its start: this release's code, whatever was there."""
    client.function_flush()
    client.function_load(
        "#!lua name=headrace_1\nredis.register_function('headrace_1_old', function() end)"
    )
    await load_library(redis)
    load_library_sync(client)
    (library,) = client.function_list("headrace_1")
    names = {function[1] for function in library[5]}
    assert b"headrace_1_enqueue" in names
    assert b"headrace_1_old" not in names


def test_both_servers_speak_either_protocol(server: Server, queue: Keys) -> None:
    """Replies mean the same over RESP2 and RESP3."""
    for protocol in (2, 3):
        with Redis(unix_socket_path=str(server.socket_path), protocol=protocol) as client:
            driver = QueueDriver(client, queue)
            driver.enqueue(f"r{protocol}")
            grant = driver.grant()
            assert grant.payload == f"r{protocol}".encode()
            assert driver.depth().running == 1
            driver.emit(grant)
            assert driver.status(f"r{protocol}").num_tokens == 1
            assert driver.finish(grant, 1).outcome is FinishOutcome.OK


@pytest.fixture
def own(server: Server) -> Iterator[QueueDriver]:
    """Drive a queue on a server of its own, which a test may fill and break."""
    with running_server(server.kind) as own_server, own_server.connect() as client:
        yield QueueDriver(client, Keys("own"))


def _fill_memory(client: Redis) -> None:
    used = client.info("memory")["used_memory"]
    client.config_set("maxmemory", used - 1)


def test_a_full_memory_stops_new_work_and_lets_running_work_end(own: QueueDriver) -> None:
    """enqueue, claim and emit are to be tried later; what keeps or ends requests goes on."""
    for number in range(4):
        own.enqueue(f"r{number}")
    first, second = own.claim(free_seqs=2).grants
    _fill_memory(own.client)
    for call in (lambda: own.enqueue("new"), own.claim, lambda: own.emit(first)):
        with pytest.raises(TransportError) as refusal:
            call()
        assert refusal.value.retryable_later
    own.heartbeat("w1")
    assert own.renew(first, second) == ()
    assert own.finish(first).outcome is FinishOutcome.OK
    assert own.release(second) == 1
    assert own.cancel("r3") is RequestState.CANCELLED
    own.reap(lease_ms=1)
    own.janitor()
    assert (own.depth().queued, own.depth().running) == (2, 0)


def test_after_a_full_memory_everything_goes_on(own: QueueDriver) -> None:
    """Nothing was lost, and the refused chunk is simply sent again."""
    own.enqueue()
    grant = own.grant()
    _fill_memory(own.client)
    with pytest.raises(TransportError):
        own.emit(grant)
    own.client.config_set("maxmemory", 0)
    assert own.emit(grant).outcome is EmitOutcome.OK
    assert own.finish(grant, 1).outcome is FinishOutcome.OK


def test_a_sweep_ends_requests_while_memory_is_full(own: QueueDriver) -> None:
    """A deadline is kept even then."""
    own.enqueue(ttl_ms=50)
    _fill_memory(own.client)
    assert eventually(lambda: own.reap().expired)
    own.client.config_set("maxmemory", 0)


def test_a_replica_refuses_for_now(own: QueueDriver) -> None:
    """READONLY, as after a failover, means later and not no."""
    own.depth()
    own.client.replicaof("127.0.0.1", "1")
    with pytest.raises(TransportError) as refusal:
        own.enqueue()
    assert refusal.value.retryable_later
    own.client.replicaof("NO", "ONE")


def test_an_unreachable_server_is_to_be_tried_later(queue: Keys) -> None:
    """Nobody listens: the error says so, and keeps its cause."""
    client = Redis(host="127.0.0.1", port=1, retry=NO_RETRY)
    with pytest.raises(TransportError) as failure:
        functions.run_sync(client, functions.depth(queue))
    assert failure.value.retryable_later
    assert failure.value.__cause__ is not None


def test_a_wrong_password_is_no_passing_trouble(own: QueueDriver) -> None:
    """Trying again does not help where the server does not know the client."""
    own.client.config_set("requirepass", "right")
    path = own.client.connection_pool.connection_kwargs["path"]
    stranger = Redis(unix_socket_path=path, password="wrong", retry=NO_RETRY)
    with pytest.raises(TransportError) as failure:
        functions.run_sync(stranger, functions.depth(own.keys))
    assert not failure.value.retryable_later
