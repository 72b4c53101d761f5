"""Redis that restarts, forgets, stalls or loses replies: the worker waits, streams stay exact."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.keys import Keys
from support.fake_engine import Misfortune
from support.queue_driver import QueueDriver
from support.servers import Server, running_server
from support.streams import Asked, check_stream, enqueue, is_drained, skewed, wait_for_ends
from support.tcp_proxy import TcpProxy
from support.waiting import eventually
from support.worker_fixtures import ON_VALKEY
from support.workers import SHORT_LEASE, WorkerFarm, seconds_since, worker_farm

SLOW = ("--step-s", "0.01")
LEASE_S = 3.0  # of an outage: long enough for a busy machine, short enough to be waited for


@pytest.fixture(params=["redis", "valkey"])
def durable(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Give a server of its own that keeps its data over a restart."""
    with running_server(request.param, {"appendonly": "yes", "appendfsync": "always"}) as server:
        yield server


def test_an_outage_longer_than_the_lease_is_a_pause(durable: Server, tmp_path: Path) -> None:
    """Nothing is granted again or lost, nobody gets a strike, the log says it once each way."""
    keys = Keys("restart")
    asked = [Asked(f"r{n}", max_tokens=100, seed=n) for n in range(6)]
    with worker_farm(tmp_path, durable.url, keys.queue) as farm:
        worker = farm.ready("--lease-ttl", f"{LEASE_S}s", engine=SLOW)
        with durable.connect() as client:
            enqueue(QueueDriver(client, keys), *asked)
            driver = QueueDriver(client, keys)
            eventually(lambda: driver.status("r0").num_tokens > 5)
        durable.stop()
        (gone,) = worker.wait_for("redis.disconnected")
        eventually(lambda: seconds_since(gone) > 1.2 * LEASE_S)
        durable.start()
        with durable.connect() as client:
            driver = QueueDriver(client, keys)
            wait_for_ends(driver, *asked)
            for request in asked:
                check_stream(driver, request)
                status = driver.status(request.request_id)
                assert (status.epoch, status.strikes) == (1, 0)
        num_gone = len(worker.events("redis.disconnected"))
        assert num_gone <= 2  # not one a call; a busy machine may be cut off once more
        worker.wait_for("redis.reconnected", count=num_gone)


@ON_VALKEY
def test_a_wiped_redis_gets_its_functions_and_groups_back(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """After FLUSHALL and FUNCTION FLUSH the worker drops what it held and answers new work."""
    worker = farm.ready(engine=SLOW)
    enqueue(driver, Asked("r1", max_tokens=4000))
    eventually(lambda: driver.status("r1").num_tokens > 0)
    driver.client.flushall()
    driver.client.function_flush()
    assert worker.wait_for("request.dropped")[0]["request_id"] == "r1"
    enqueue(driver, asked := Asked("r2"))
    wait_for_ends(driver, asked)
    check_stream(driver, asked)


@ON_VALKEY
def test_a_redis_that_stalls_pauses_the_engine(driver: QueueDriver, farm: WorkerFarm) -> None:
    """Tokens that Redis does not take are bounded: the engine waits, and goes on afterwards."""
    asked = Asked("r1", prompt=(5, Misfortune.WAIT, 5), max_tokens=500)
    worker = farm.ready("--max-unsent-tokens", "64", engine=("--step-s", "0.003"))
    enqueue(driver, asked)
    eventually(lambda: driver.status("r1").num_tokens > 0)
    driver.client.config_set("maxmemory", "1")
    farm.open_gate()
    worker.wait_for("redis.disconnected")
    published = driver.status("r1").num_tokens
    worker.wait_for("reader.slow")
    driver.client.config_set("maxmemory", "0")
    wait_for_ends(driver, asked)
    check_stream(driver, asked)
    assert published <= 5  # what was made before the gate


@ON_VALKEY
@pytest.mark.parametrize("function", ["claim", "finish"])
async def test_lost_replies_double_nothing(
    driver: QueueDriver, farm: WorkerFarm, server: Server, function: str
) -> None:
    """The work was done and the answer lost, again and again: every stream is exact."""
    asked = skewed(16, longest=60)
    async with TcpProxy(server.socket_path) as proxy:
        proxy.lose_replies(f"headrace_1_{function}".encode(), times=4)
        worker = farm.start(url=proxy.url, engine=("--step-s", "0.02"))
        await asyncio.to_thread(worker.wait_until_ready)
        await asyncio.to_thread(enqueue, driver, *asked)
        await asyncio.to_thread(wait_for_ends, driver, *asked)
        assert proxy.num_swallowed > 0
    for request in asked:
        check_stream(driver, request)
    assert eventually(lambda: is_drained(driver))
    if function == "claim":
        assert all(driver.status(r.request_id).epoch == 1 for r in asked)


@ON_VALKEY
async def test_a_silent_partition_is_noticed_and_streams_go_on_elsewhere(
    driver: QueueDriver, farm: WorkerFarm, server: Server
) -> None:
    """The proxy goes silent without a reset: another worker takes over, the first drops its own."""
    asked = [Asked(f"r{n}", max_tokens=300, seed=n) for n in range(4)]
    asked[0] = replace(asked[0], prompt=(5, Misfortune.WAIT, 12))
    async with TcpProxy(server.socket_path) as proxy:
        cut_off = farm.start(*SHORT_LEASE, url=proxy.url, engine=SLOW)
        await asyncio.to_thread(cut_off.wait_until_ready)
        await asyncio.to_thread(enqueue, driver, *asked)
        await asyncio.to_thread(eventually, lambda: driver.status("r0").num_tokens > 5)
        proxy.is_silent = True
        farm.open_gate()
        await asyncio.to_thread(cut_off.wait_for, "redis.disconnected")
        await asyncio.to_thread(farm.ready, *SHORT_LEASE)
        await asyncio.to_thread(wait_for_ends, driver, *asked)
        proxy.is_silent = False
        proxy.reset_all()
        await asyncio.to_thread(cut_off.wait_for, "request.dropped", 4)
    for request in asked:
        check_stream(driver, request)
