"""A worker process among random attacks with the rights of another tenant's producer."""

from __future__ import annotations

import redis

from headrace.rights import Role
from support.acl_users import acl_users
from support.hostile_producer import NAME, HostileProducer
from support.queue_driver import QueueDriver
from support.servers import Server
from support.streams import Asked, check_stream, enqueue, wait_for_ends
from support.worker_fixtures import ON_VALKEY
from support.workers import WorkerFarm

NUM_REQUESTS = 4
ATTACKS_A_REQUEST = 200


@ON_VALKEY
def test_a_worker_lives_on_and_answers_exactly_whatever_another_tenant_writes(
    driver: QueueDriver, farm: WorkerFarm, server: Server
) -> None:
    """Every stream is its reference, and the process that served the first serves the last."""
    worker = farm.ready()
    with acl_users(driver.client, server, driver.keys) as users:
        with redis.from_url(users.add(Role.PRODUCER, NAME)) as connection:
            mallory = HostileProducer(QueueDriver(connection, driver.keys), seed=4711)
            for number in range(NUM_REQUESTS):
                enqueue(driver, asked := Asked(f"r{number}"), priority=number)
                for _ in range(ATTACKS_A_REQUEST):
                    mallory.attack()
                wait_for_ends(driver, asked)
                check_stream(driver, asked)
    assert worker.child.poll() is None
    driver.client.delete(*driver.client.scan_iter(f"{driver.keys.base}:*"))
