"""Failover by real Sentinels: clients and workers find the new master, and no stream is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import AsyncClient, Client, RequestNotFound, Timeout, TransportError
from headrace.keys import Keys
from support.queue_driver import TENANT, QueueDriver
from support.sentinel import NUM_REPLICAS, PASSWORD, Replicated, replicated
from support.servers import Server
from support.streams import Asked, check_answer, enqueue, wait_for_ends
from support.waiting import PATIENCE_S, eventually
from support.worker_fixtures import ON_VALKEY
from support.workers import WorkerFarm, worker_farm

QUEUE = "failover"
PATIENT = Timeout(first_chunk=60.0, between_chunks=60.0, total=90.0, redis=60.0)
SLOW = ("--step-s", "0.02")


@pytest.fixture(params=["redis"])
def watched(request: pytest.FixtureRequest) -> Iterator[Replicated]:
    """Give a master, a replica and three Sentinels."""
    with replicated(request.param) as watched:
        yield watched


@pytest.fixture
def farm(tmp_path: Path, watched: Replicated) -> Iterator[WorkerFarm]:
    """Give a starter of workers that know the Sentinels only."""
    with worker_farm(tmp_path, watched.url, QUEUE) as farm:
        yield farm


async def test_streams_go_on_through_failovers(watched: Replicated, farm: WorkerFarm) -> None:
    """The master is killed under load: both clients read every token once, and all requests end.

    What was acknowledged and not yet replicated may be gone, and says so; what is there is exact.
    """
    asked = [Asked(f"r{n}", max_tokens=100, seed=n) for n in range(6)]
    late = [Asked(f"late-{n}", max_tokens=2, seed=n) for n in range(60)]
    afterwards = [Asked(f"afterwards-{n}", max_tokens=2, seed=n) for n in range(5)]
    worker = await asyncio.to_thread(farm.ready, engine=SLOW)
    await asyncio.to_thread(_enqueue_replicated, watched.servers[0], asked)
    async with AsyncClient(watched.url, queue=QUEUE, tenant=TENANT, timeout=PATIENT) as client:
        reading = [asyncio.create_task(_read(client, request)) for request in asked[:3]]
        reading += [asyncio.create_task(asyncio.to_thread(_read_sync, watched.url, asked[3]))]
        await asyncio.to_thread(_wait_for_tokens, watched.servers[0])
        submitting = asyncio.create_task(_submit_all(client, late))
        await asyncio.to_thread(_wait_for_any, watched.servers[0], late[20])
        await asyncio.to_thread(_wait_for_replicas, watched.servers[0])
        watched.servers[0].kill()
        new = await asyncio.to_thread(watched.wait_for_failover, watched.servers[0])
        await submitting
        await _submit_all(client, afterwards)
        for request, tokens in zip(asked, await asyncio.gather(*reading), strict=False):
            assert tokens == request.answer, f"{request.request_id} as it was read"
        lost = [request for request in late if await _is_unknown(client, request)]
    there = [request for request in late if request not in lost]
    await asyncio.to_thread(_check_all, new, [*asked, *there, *afterwards])
    assert not [request for request in lost if request in late[:21]], "they were replicated"
    assert PASSWORD not in worker.output


@pytest.mark.parametrize("watched", ["valkey"], indirect=True)
async def test_an_ordered_failover_loses_nothing(watched: Replicated, farm: WorkerFarm) -> None:
    """The master is demoted and lives on: no loop ends, streams are exact (queue B25)."""
    asked = [Asked(f"r{n}", max_tokens=100, seed=n) for n in range(4)]
    worker = await asyncio.to_thread(farm.ready, engine=SLOW)
    await asyncio.to_thread(_enqueue_replicated, watched.servers[0], asked)
    async with AsyncClient(watched.url, queue=QUEUE, tenant=TENANT, timeout=PATIENT) as client:
        reading = [asyncio.create_task(_read(client, request)) for request in asked]
        await asyncio.to_thread(_wait_for_tokens, watched.servers[0])
        with watched.sentinel(0) as sentinel:
            sentinel.execute_command("SENTINEL", "FAILOVER", "mymaster")
        new = await asyncio.to_thread(watched.wait_for_failover, watched.servers[0])
        assert await asyncio.gather(*reading) == [request.answer for request in asked]
    await asyncio.to_thread(_check_all, new, asked)
    assert worker.child.poll() is None


@ON_VALKEY
async def test_a_server_that_is_demoted_for_a_while_is_waited_for(
    server: Server, driver: QueueDriver, tmp_path: Path
) -> None:
    """Reads end with UNBLOCKED, writes with READONLY; no loop ends (queue B25)."""
    asked = Asked("r0", max_tokens=60)
    with worker_farm(tmp_path, server.url, driver.keys.queue) as farm:
        worker = await asyncio.to_thread(farm.ready, engine=SLOW)
        async with AsyncClient(
            server.url, queue=driver.keys.queue, tenant=TENANT, timeout=PATIENT
        ) as client:
            enqueue(driver, asked)
            reading = asyncio.create_task(_read(client, asked))
            await asyncio.to_thread(_wait_for_tokens, server, driver.keys, 10)
            driver.client.replicaof("127.0.0.1", "1")
            await asyncio.to_thread(worker.wait_for, "redis.disconnected")
            driver.client.replicaof("NO", "ONE")
            assert await reading == asked.answer
        check_answer(driver, asked)


@pytest.mark.parametrize("scheme", ["redis+sentinel", "rediss+sentinel"])
async def test_sentinels_that_are_all_away_are_named(scheme: str) -> None:
    """The error says who was asked for which master, and holds no password."""
    url = f"{scheme}://user:{PASSWORD}@127.0.0.1:1,127.0.0.1:2/main?sentinel_password={PASSWORD}"
    at_once = Timeout(redis=0.01)
    async with AsyncClient(url, timeout=at_once) as client:
        with pytest.raises(
            TransportError, match=r"'main': 127\.0\.0\.1:1: .*127\.0\.0\.1:2:"
        ) as one:
            await client.submit("Hi")
    with Client(url, timeout=at_once) as client_of_threads:
        with pytest.raises(TransportError, match="no Sentinel tells the master 'main'") as other:
            client_of_threads.submit("Hi")
    assert PASSWORD not in str(one.value) + str(other.value)


async def _submit_all(client: AsyncClient, requests: list[Asked]) -> None:
    for request in requests:
        options = {"max_tokens": request.max_tokens, "seed": request.seed, "ignore_eos": True}
        await client.submit(list(request.prompt), request_id=request.request_id, **options)  # type: ignore[arg-type]


async def _is_unknown(client: AsyncClient, request: Asked) -> bool:
    try:
        await client.status(request.request_id)
    except RequestNotFound:
        return True
    return False


def _wait_for_any(master: Server, request: Asked) -> None:
    key = Keys(QUEUE).request(TENANT, request.request_id)
    with master.connect() as client:
        eventually(lambda: client.exists(key))


async def _read(client: AsyncClient, request: Asked) -> list[int]:
    async with client.attach(request.request_id) as stream:
        return [token async for chunk in stream for token in chunk.token_ids]


def _read_sync(url: str, request: Asked) -> list[int]:
    with Client(url, queue=QUEUE, tenant=TENANT, timeout=PATIENT) as client:
        with client.attach(request.request_id) as stream:
            return [token for chunk in stream for token in chunk.token_ids]


def _enqueue_replicated(master: Server, asked: list[Asked]) -> None:
    with master.connect() as client:
        enqueue(QueueDriver(client, Keys(QUEUE)), *asked)
    _wait_for_replicas(master)


def _wait_for_replicas(master: Server) -> None:
    with master.connect() as client:
        client.set("probe", 1, ex=600)  # WAIT goes by the last write of its own connection
        assert client.wait(NUM_REPLICAS, round(PATIENCE_S * 1000)) == NUM_REPLICAS


def _wait_for_tokens(master: Server, keys: Keys | None = None, least: int = 15) -> None:
    with master.connect() as client:
        driver = QueueDriver(client, keys or Keys(QUEUE))
        eventually(lambda: driver.status("r0").num_tokens > least)


def _check_all(master: Server, asked: list[Asked]) -> None:
    with master.connect() as client:
        driver = QueueDriver(client, Keys(QUEUE))
        wait_for_ends(driver, *asked)
        for request in asked:
            check_answer(driver, request)
