"""Workers among random attacks by a producer of another tenant: no call fails, all are served."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from redis import Redis

from headrace import functions
from headrace.functions import FinishOutcome, Grant
from headrace.keys import Keys
from headrace.rights import Role
from headrace.types import FinishReason
from support.acl_users import acl_users
from support.hostile_producer import NAME, HostileProducer
from support.queue_driver import QueueDriver
from support.servers import Server
from support.waiting import eventually

NUM_ROUNDS = 80
ATTACKS_A_ROUND = 12


@pytest.fixture
def driver(client: Redis, queue: Keys) -> Iterator[QueueDriver]:
    """Drive a queue whose ruins are cleared away."""
    yield QueueDriver(client, queue)
    client.delete(*client.scan_iter(f"{queue.base}:*"))


@pytest.mark.parametrize("seed", [4711, 4712])
def test_every_request_of_another_tenant_is_answered_under_attack(
    client: Redis, server: Server, driver: QueueDriver, seed: int
) -> None:
    """Claims, emits, ends, sweeps, cleanings and counts go on whatever is written meanwhile."""
    with acl_users(client, server, driver.keys) as users:
        with redis.from_url(users.add(Role.PRODUCER, NAME)) as connection:
            mallory = HostileProducer(QueueDriver(connection, driver.keys), seed)
            for number in range(NUM_ROUNDS):
                for _ in range(ATTACKS_A_ROUND):
                    mallory.attack()
                _work(driver, f"w{number % 2}")
                driver.enqueue("r1", priority=(0, 5, 9)[number % 3], ttl_ms=600_000)
                eventually(lambda: _is_served(driver))
                assert driver.end().finish_reason is FinishReason.STOP
                client.delete(driver.keys.request("acme", "r1"))


def _work(driver: QueueDriver, worker_id: str) -> None:
    """Live through a turn of a worker that is not too careful."""
    grants = driver.claim(worker_id).grants
    for grant in grants[::2]:
        driver.emit(grant, grant.num_tokens, worker_id=worker_id)
        driver.renew(grant, worker_id=worker_id)
    driver.release(*grants[::3], worker_id=worker_id, strike=True, cause="killed")
    driver.heartbeat(worker_id)
    driver.run(functions.list_dead(driver.keys))
    assert driver.depth().queued >= 0


def _is_served(driver: QueueDriver) -> bool:
    """Sweep, clean and serve; say whether the victim's request has ended."""
    driver.reap_after(1)
    driver.janitor()
    for grant in driver.claim("good").grants:
        _finish(driver, grant)
    return driver.status().state.is_terminal


def _finish(driver: QueueDriver, grant: Grant) -> None:
    reply = driver.finish(grant, grant.num_tokens, "good")
    if reply.outcome is FinishOutcome.GAP:
        driver.finish(grant, reply.offset, "good")
