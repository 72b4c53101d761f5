"""A hostile producer writes into its own requests, and into the books that all tenants share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import redis
from redis import Redis

from headrace import functions
from headrace.errors import ErrorCode
from headrace.keys import Keys
from headrace.rights import Role
from support.acl_users import acl_users
from support.queue_driver import QueueDriver
from support.servers import Server
from support.waiting import eventually

VICTIM, MALLORY = "acme", "mallory"
VALUES: list[Any] = ["", "x", "-1", "007", "1.5", "9" * 14, "9" * 16, b"\xff\xfe"]
FIELDS = ["attached", "deaths", "strikes", "granted_tokens", "epoch", "num_tokens", "started_ms",
          "cancel", "cost", "result_ttl_ms", "entry", "lane", "owner", "state"]  # fmt: skip
EVIDENCE = [[1, 2, 3], ["x"] * 3, [{"err": "x"}] * 3, [["a"] * 7] * 3, [[b"\xff"] * 7] * 3,
            [[[1], {}, None, -1, 1e300, True, [2]]] * 3, {3: [1]}]  # fmt: skip


@pytest.fixture
def mallory(client: Redis, server: Server, queue: Keys) -> Iterator[QueueDriver]:
    """Give the queue as a producer confined to one tenant may use it."""
    with acl_users(client, server, queue) as users:
        with redis.from_url(users.add(Role.PRODUCER, MALLORY)) as connection:
            yield QueueDriver(connection, queue)


@pytest.fixture
def driver(client: Redis, queue: Keys) -> Iterator[QueueDriver]:
    """Drive a queue whose ruins are cleared away, as its counts may be wrong afterwards."""
    yield QueueDriver(client, queue)
    client.delete(*client.scan_iter(f"{queue.base}:*"))


def _spoil(mallory: QueueDriver, request_id: str, **fields: Any) -> None:
    mapping: dict[Any, Any] = fields
    mallory.client.hset(mallory.keys.request(MALLORY, request_id), mapping=mapping)


def _serve(driver: QueueDriver, request_id: str) -> None:
    """Claim until the victim's request comes, and finish it."""
    granted = [grant for _ in range(20) for grant in driver.claim().grants]
    mine = next(grant for grant in granted if grant.request_id == request_id)
    driver.emit(mine, mine.num_tokens)
    assert driver.finish(mine, mine.num_tokens + 1).outcome.name == "OK"


@pytest.mark.parametrize("field", FIELDS)
def test_a_worker_that_vanishes_with_a_spoiled_request_holds_up_nobody(
    mallory: QueueDriver, driver: QueueDriver, field: str
) -> None:
    """Spoiled while it runs, it is swept like any other, and its neighbour runs again."""
    for number in range(len(VALUES)):
        mallory.enqueue(f"s{number}", tenant=MALLORY)
    driver.enqueue("good", tenant=VICTIM)
    driver.claim(free_seqs=20)
    for number, value in enumerate(VALUES):
        _spoil(mallory, f"s{number}", **{field: value})
    eventually(lambda: driver.reap_after(1) and driver.status("good", VICTIM).state == "queued")
    driver.janitor()
    _serve(driver, "good")


@pytest.mark.parametrize("field", FIELDS)
def test_no_claim_stumbles_over_a_spoiled_request(
    mallory: QueueDriver, driver: QueueDriver, field: str
) -> None:
    """Every grant can be read, whatever its producer wrote into it while it waited."""
    for number, value in enumerate(VALUES):
        mallory.enqueue(f"s{number}", tenant=MALLORY)
        _spoil(mallory, f"s{number}", **{field: value})
    driver.enqueue("good", tenant=VICTIM)
    _serve(driver, "good")
    driver.janitor()


@pytest.mark.parametrize("evidence", EVIDENCE, ids=str)
def test_forged_evidence_stops_neither_claims_nor_sweeps_nor_the_list(
    mallory: QueueDriver, driver: QueueDriver, evidence: Any
) -> None:
    """A suspect with deaths that never were: others are served, and dead letters can be listed."""
    driver.enqueue("good", tenant=VICTIM)
    mallory.enqueue("s", tenant=MALLORY)
    _spoil(mallory, "s", strikes=3, evidence=msgpack.packb(evidence))
    driver.client.hset(driver.keys.dead_books, "culprits", "\nx\n")
    _serve(driver, "good")
    driver.let_leases_lapse()
    (letter,) = driver.run(functions.list_dead(driver.keys))
    assert letter.evidence[-1].cause == "its lease ran out"


@pytest.mark.parametrize("owner", ["_requeued", "_suspects"])
def test_a_request_that_claims_to_run_where_others_wait_is_closed(
    mallory: QueueDriver, driver: QueueDriver, owner: str
) -> None:
    """It would come first again and again, and nobody behind it would ever be granted."""
    mallory.enqueue("s", tenant=MALLORY)
    _spoil(mallory, "s", state="running", owner=owner)
    mallory.client.zadd(driver.keys.served(5), {MALLORY: "-inf"})
    driver.enqueue("good", tenant=VICTIM)
    _serve(driver, "good")
    assert driver.end("s", MALLORY).error_code is ErrorCode.LOST


def test_an_id_that_is_no_text_never_reaches_a_worker(
    mallory: QueueDriver, driver: QueueDriver, client: Redis
) -> None:
    """A hash with such a name, past its deadline, is passed over by the sweep."""
    mallory.enqueue("s", tenant=MALLORY)
    whole: Any = client.hgetall(driver.keys.request(MALLORY, "s"))
    name = driver.keys.request(MALLORY, "").encode() + b"\xff"
    mallory.client.hset(name, mapping={**whole, b"deadline_ms": 1})
    mallory.client.zadd(driver.keys.deadlines, {f"{MALLORY}:".encode() + b"\xff": 1})
    assert driver.reap().expired == ()
    assert not client.exists(driver.keys.deadlines)
    driver.janitor()


@pytest.mark.parametrize("field", ["queued", "running", "bytes", "queued:5", "queued:5:acme"])
def test_counts_that_are_none_read_as_none(
    mallory: QueueDriver, driver: QueueDriver, field: str
) -> None:
    """Each heartbeat reads them, so they must not end the worker."""
    for value in VALUES:
        mallory.client.hset(driver.keys.stats, field, value)
        assert driver.depth().queued >= 0
    mallory.client.hset(driver.keys.stats, mapping={"queued:z": 1, "queued:5:a:b": 1, b"\xff": 1})
    assert set(driver.depth().queued_by_lane) <= {5}


@pytest.mark.parametrize("has_counts", [False, True])
def test_tenants_that_are_made_up_delay_others_for_a_moment_only(
    mallory: QueueDriver, driver: QueueDriver, has_counts: bool
) -> None:
    """Some dozens of them are removed by each claim, with the counts that were made up, too."""
    names = [f"a-ghost{number}" for number in range(1000)]
    mallory.client.zadd(driver.keys.served(5), dict.fromkeys(names, -1.0))
    if has_counts:
        mallory.client.hset(driver.keys.stats, mapping={f"queued:5:{name}": 1 for name in names})
        mallory.client.hset(driver.keys.stats, "queued:5", 1000)
    driver.enqueue("good", tenant=VICTIM)
    _serve(driver, "good")
    driver.claim()
    driver.janitor()
    assert not driver.client.exists(driver.keys.served(5))


def test_a_deadline_that_was_removed_is_put_back(mallory: QueueDriver, driver: QueueDriver) -> None:
    """Any producer may take it out of the list that the sweep goes through."""
    driver.enqueue("good", tenant=VICTIM, ttl_ms=600_000)
    mallory.client.zrem(driver.keys.deadlines, f"{VICTIM}:good")
    driver.janitor()
    assert driver.client.zscore(driver.keys.deadlines, f"{VICTIM}:good")


@pytest.mark.parametrize("value", [None, "x", "-7", "0", "7", "9" * 13])
def test_wrong_counts_are_put_right(
    mallory: QueueDriver, driver: QueueDriver, value: str | None
) -> None:
    """A lane without a count is never looked into; the janitor counts what is in it."""
    driver.enqueue("good", tenant=VICTIM)
    driver.enqueue("runs", tenant=VICTIM, priority=0)
    driver.grant()
    before = driver.depth()
    for what in ("queued", "running"):
        for field in (what, f"{what}:5", f"{what}:5:{VICTIM}", f"{what}:3:ghost"):
            mallory.client.hdel(driver.keys.stats, field)
            if value is not None:
                mallory.client.hset(driver.keys.stats, field, value)
    driver.janitor()
    driver.janitor()
    after = driver.depth()
    assert (after.queued, after.running) == (before.queued, before.running) == (1, 1)
    assert (after.by_tenant, after.queued_by_lane) == (before.by_tenant, before.queued_by_lane)
    _serve(driver, "good")
