"""A flood of requests: what Redis alone can hold, and what it costs the other tenants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from redis import Redis

from headrace import functions
from headrace.errors import TransportError
from headrace.functions import EnqueueOutcome, load_library_sync
from headrace.keys import Keys
from headrace.rights import Role
from support.acl_users import acl_users
from support.queue_driver import QueueDriver
from support.servers import KINDS, Server, running_server

MAXMEMORY = "16mb"
MALLORY = "mallory"


@pytest.fixture(params=KINDS)
def small(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Give a server of its own with little memory."""
    with running_server(request.param, {"maxmemory": MAXMEMORY}) as server:
        yield server


@pytest.fixture
def outside(small: Server) -> Iterator[Redis]:
    """Look at that server."""
    with small.connect() as client:
        yield client


def test_a_flood_stops_at_maxmemory_and_costs_nobody_what_is_queued(
    small: Server, outside: Redis
) -> None:
    """A producer that passes no bound fills the server; what others had is kept and can end.

    Enqueues are then refused in words that say "later". An operator who cancels the flood frees the
    memory, and the queue goes on.
    """
    keys = Keys("flooded")
    driver = QueueDriver(outside, keys)
    driver.enqueue("r1")
    running = driver.grant("w1")
    driver.enqueue("r2")
    with acl_users(outside, small, keys) as users:
        with redis.from_url(users.add(Role.PRODUCER, MALLORY)) as connection:
            accepted = _flood(QueueDriver(connection, keys))
    num_late, refusal = _enqueue_until_refused(driver)
    assert refusal.retryable_later
    assert driver.depth().queued == len(accepted) + num_late + 1
    assert driver.finish(running).outcome.name == "OK"
    for request_id in accepted:
        driver.cancel(request_id, MALLORY)
    outside.delete(*outside.scan_iter(f"{keys.base}:???:{MALLORY}:*", count=1000))  # their results
    assert driver.grant("w1").request_id == "r2"
    assert driver.enqueue("r3").outcome is EnqueueOutcome.OK


def test_the_bound_of_a_tenant_is_one_that_an_honest_client_sets(
    client: Redis, driver: QueueDriver
) -> None:
    """With max_queued_per_tenant a gateway is held at its own tenants' bounds, others are not."""
    load_library_sync(client)
    outcomes = [
        driver.enqueue(f"r{number}", tenant=MALLORY, max_queued_per_tenant=3).outcome
        for number in range(5)
    ]
    assert outcomes == [EnqueueOutcome.OK] * 3 + [EnqueueOutcome.FULL] * 2
    assert driver.enqueue("r1", max_queued_per_tenant=3).outcome is EnqueueOutcome.OK


def _enqueue_until_refused(driver: QueueDriver) -> tuple[int, TransportError]:
    """Fill what the flooder's own buffers took; return how many went in, and the refusal."""
    for number in range(5000):
        try:
            driver.enqueue(f"late-{number}")
        except TransportError as error:
            return number, error
    raise AssertionError("the server never filled up")


def _flood(mallory: QueueDriver) -> list[str]:
    """Enqueue large requests and then tiny ones until Redis refuses; return what it took."""
    accepted: list[str] = []
    for size in (16 * 1024, 1):
        accepted += _flood_with(mallory, bytes(size), len(accepted))
    return accepted


def _flood_with(mallory: QueueDriver, payload: bytes, first: int) -> list[str]:
    accepted: list[str] = []
    for page in range(1000):
        names = [f"{first}-{page}-{number}" for number in range(20)]
        with mallory.client.pipeline(transaction=False) as pipe:
            for name in names:
                call = functions.enqueue(
                    mallory.keys, tenant=MALLORY, request_id=name, payload=payload, cost=1,
                    priority=0, result_ttl_ms=60_000,
                )  # fmt: skip
                pipe.fcall(f"{functions.LIBRARY}_{call.function}", 1, call.key, *call.args)
            replies = pipe.execute(raise_on_error=False)
        taken = [n for n, r in zip(names, replies, strict=True) if not isinstance(r, Exception)]
        accepted += taken
        if len(taken) < len(names):
            return accepted
    raise AssertionError("the server never filled up")
