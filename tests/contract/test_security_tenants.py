"""A hostile producer of one tenant: what Redis refuses it, and what its rights cannot harm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
from redis import Redis

from headrace import functions
from headrace.errors import ErrorCode, TransportError
from headrace.functions import EmitItem, Grant, Held
from headrace.keys import Keys
from headrace.rights import Role
from headrace.types import RequestState
from support.acl_users import acl_users
from support.queue_driver import QueueDriver
from support.servers import Server

VICTIM, MALLORY = "acme", "mallory"


@pytest.fixture
def grant(driver: QueueDriver) -> Grant:
    """Give a victim's request that runs, with three tokens in its log; another one waits."""
    driver.enqueue("r1", tenant=VICTIM, ttl_ms=600_000)
    grant = driver.grant("w1")
    driver.emit(grant, 0, 3)
    driver.enqueue("r2", tenant=VICTIM)
    return grant


@pytest.fixture
def mallory(client: Redis, server: Server, driver: QueueDriver) -> Iterator[QueueDriver]:
    """Give the queue as a producer confined to another tenant may use it."""
    with acl_users(client, server, driver.keys) as users:
        with redis.from_url(users.add(Role.PRODUCER, MALLORY)) as connection:
            yield QueueDriver(connection, driver.keys)


def _raw(driver: QueueDriver) -> Any:
    return driver.client.execute_command


def _raw_attacks(keys: Keys) -> list[list[Any]]:
    log, request = keys.token_log(VICTIM, "r1"), keys.request(VICTIM, "r1")
    lane = keys.lane(5, VICTIM)
    return [
        # forge, shorten, delete and read the victim's output
        ["XADD", log, "4-0", "c", "forged"], ["XADD", log, "3-1", "e", "forged"],
        ["XTRIM", log, "MAXLEN", 0], ["XDEL", log, "3-0"], ["DEL", log], ["UNLINK", log],
        ["XREAD", "STREAMS", log, "0"], ["XRANGE", log, "-", "+"], ["EXPIRE", log, 1],
        ["PEXPIRE", log, 1], ["RENAME", log, keys.token_log(MALLORY, "r1")],
        ["COPY", log, keys.token_log(MALLORY, "r1")], ["DUMP", log], ["XSETID", log, "9-9"],
        ["XREAD", "STREAMS", keys.token_log(MALLORY, "x"), log, "0", "0"],
        # read and change the victim's prompt and state
        ["HGET", request, "payload"], ["HMGET", request, "payload"], ["HGETALL", request],
        ["HSET", request, "owner", "mallory"], ["HDEL", request, "payload"], ["DEL", request],
        ["HINCRBY", request, "epoch", 1], ["SORT", request], ["EXISTS", request],
        # forge a lease, or take the victim's entry out of the queue
        ["XCLAIM", lane, "workers", "mallory", 0, "0-1"], ["XACK", lane, "workers", "0-1"],
        ["XADD", lane, "*", "r", "r9"], ["XDEL", lane, "0-1"], ["DEL", lane],
        ["XREADGROUP", "GROUP", "workers", "m", "STREAMS", lane, ">"], ["XLEN", lane],
        ["XGROUP", "CREATE", lane, "spy", "0"], ["XGROUP", "DESTROY", lane, "workers"],
        # what all tenants share can be used, but not removed or replaced
        ["DEL", keys.stats], ["SET", keys.stats, "x"], ["HGETALL", keys.stats],
        ["DEL", keys.served(5)], ["DEL", keys.deadlines], ["ZRANGE", keys.deadlines, 0, -1],
        ["XADD", keys.deadlines, "*", "a", "b"], ["ZADD", keys.wake, 1, "x"],
        ["XREAD", "STREAMS", keys.dead, "0"], ["XADD", keys.dead, "*", "a", "b"],
        ["HSET", keys.dead_books, "bytes", 10**12], ["DEL", keys.dead_books],
        ["HSET", keys.worker("w1"), "_nonce", "x"], ["ZADD", keys.workers, 1, "w9"],
        ["SET", keys.sweep, "mallory"], ["SUBSCRIBE", keys.control],
        ["PUBLISH", "{other}:ctl", "x"], ["SET", "{other}:stats", "x"],
    ]  # fmt: skip


SERVER_ATTACKS: list[list[Any]] = [
    ["EVAL", "return 1", 0], ["EVALSHA", "0" * 40, 0], ["SCRIPT", "FLUSH"],
    ["SCRIPT", "LOAD", "return 1"], ["SCRIPT", "KILL"], ["FUNCTION", "FLUSH"],
    ["FUNCTION", "LOAD", "REPLACE", "#!lua name=headrace_1\n"],
    ["FUNCTION", "DELETE", "headrace_1"],
    ["FUNCTION", "DUMP"], ["FUNCTION", "LIST"], ["FUNCTION", "KILL"], ["CONFIG", "GET", "*"],
    ["CONFIG", "SET", "maxmemory", "1"], ["CONFIG", "RESETSTAT"], ["KEYS", "*"], ["SCAN", "0"],
    ["RANDOMKEY"], ["DBSIZE"], ["FLUSHALL"], ["FLUSHDB"], ["SWAPDB", 0, 1], ["INFO"], ["MONITOR"],
    ["SHUTDOWN", "NOSAVE"], ["SAVE"], ["BGSAVE"], ["BGREWRITEAOF"],
    ["REPLICAOF", "127.0.0.1", "1"], ["PSYNC", "?", "-1"], ["SYNC"], ["CLUSTER", "RESET"],
    ["ACL", "SETUSER", "mallory2", "on", "nopass", "+@all"], ["ACL", "LIST"],
    ["ACL", "GETUSER", "x"], ["ACL", "SAVE"], ["CLIENT", "LIST"],
    ["CLIENT", "KILL", "TYPE", "normal"], ["CLIENT", "PAUSE", "60000", "ALL"],
    ["CLIENT", "NO-EVICT", "on"], ["SLOWLOG", "GET"], ["LATENCY", "RESET"],
    ["MEMORY", "DOCTOR"], ["MODULE", "LIST"], ["WAIT", 1, 1],
    ["MULTI"], ["PSUBSCRIBE", "*"], ["PUBSUB", "CHANNELS"], ["COMMAND"],
]  # fmt: skip


def test_redis_refuses_every_reach_for_another_tenant(
    mallory: QueueDriver, driver: QueueDriver, grant: Grant
) -> None:
    """Output, prompt, state, lease and lane of the victim, and what all share, stay as they are."""
    before, execute = driver.log("r1", VICTIM), _raw(mallory)
    for attack in _raw_attacks(driver.keys):
        with pytest.raises(redis.exceptions.NoPermissionError):
            execute(*attack)
    assert driver.log("r1", VICTIM) == before
    assert driver.status("r2", VICTIM).state is RequestState.QUEUED


def test_redis_refuses_every_reach_for_the_server(mallory: QueueDriver, client: Redis) -> None:
    """Scripts, functions, settings, users, other clients and the list of keys are out of reach."""
    execute = _raw(mallory)
    for attack in SERVER_ATTACKS:
        with pytest.raises((redis.exceptions.NoPermissionError, redis.ConnectionError)):
            execute(*attack)
    assert client.ping()


def test_the_queues_own_functions_do_not_lend_their_rights(
    mallory: QueueDriver, driver: QueueDriver, grant: Grant
) -> None:
    """Called by a producer, each function for workers and operators fails before it writes."""
    keys, held = driver.keys, Held(grant.tenant, grant.request_id, grant.epoch)
    item = EmitItem(grant.tenant, grant.request_id, grant.epoch, 3, 1, b"forged")
    end = {"num_tokens": 3, "state": RequestState.FAILED, "terminal": b"", "finish_reason": "stop"}
    calls: list[functions.Call[Any]] = [
        functions.emit(keys, worker_id="w1", items=[item]),
        functions.finish(keys, worker_id="w1", tenant=VICTIM, request_id="r1", epoch=1, **end),  # type: ignore[arg-type]
        functions.renew(keys, worker_id="w1", held=[held], lease_ms=1),
        functions.release(keys, worker_id="w1", held=[held], strike=True),
        functions.reap(keys, worker_id="w1", lease_ms=1, count=9),
        functions.janitor(keys, worker_id="w1", count=9),
        functions.heartbeat(keys, worker_id="w1", info={"model": "x"}, ttl_ms=1),
        functions.list_dead(keys), functions.purge_dead(keys), functions.depth(keys),
        functions.cancel(keys, tenant=VICTIM, request_id="r1"),
        functions.status(keys, tenant=VICTIM, request_id="r1"),
    ]  # fmt: skip
    before, hash_before = driver.log("r1", VICTIM), _hash_of(driver, "r1")
    for call in calls:  # some answer that there is no such request, as its hash cannot be read
        with suppress(TransportError):
            mallory.run(call)
    for refused in (lambda: mallory.claim("mallory"), lambda: mallory.enqueue("r1", tenant=VICTIM)):
        with pytest.raises(TransportError, match=r"permission|can't access"):
            refused()
    assert (driver.log("r1", VICTIM), _hash_of(driver, "r1")) == (before, hash_before)
    assert not driver.client.exists(driver.keys.worker("mallory"), driver.keys.sweep)
    assert driver.emit(grant, 3).outcome.name == "OK"


def _hash_of(driver: QueueDriver, request_id: str) -> object:
    return driver.client.hgetall(driver.keys.request(VICTIM, request_id))


def test_a_deadline_written_for_another_tenant_ends_nothing(
    mallory: QueueDriver, driver: QueueDriver, grant: Grant
) -> None:
    """Deadlines are in a key that all share; only the request's own deadline counts."""
    forged = {f"{VICTIM}:r1": 1, f"{VICTIM}:r2": 1, f"{VICTIM}:none": 1, "no colon": 1}
    mallory.client.zadd(driver.keys.deadlines, forged)
    assert driver.reap().expired == ()
    assert driver.status("r1", VICTIM).state is RequestState.RUNNING
    assert driver.status("r2", VICTIM).state is RequestState.QUEUED
    left: Any = driver.client.zrange(driver.keys.deadlines, 0, -1, withscores=True)
    assert [name for name, _ in left] == [f"{VICTIM}:r1".encode()]
    assert left[0][1] > 1e12  # its real one is back


def test_used_up_ids_of_the_wake_stream_stop_nobody(
    mallory: QueueDriver, driver: QueueDriver
) -> None:
    """The greatest id in the stream that idle workers wait on: it begins anew."""
    last = f"{2**64 - 1}-{2**64 - 1}"
    mallory.client.xadd(driver.keys.wake, {"w": 1}, id=last)
    driver.enqueue("r1", tenant=VICTIM)
    assert driver.grant("w1").request_id == "r1"
    assert driver.client.xinfo_stream(driver.keys.wake)["last-generated-id"] != last


HOSTILE_VALUES: list[str | bytes] = ["", "x", "-1", "1e300", "9" * 18, "nan", b"\xff" * 40, "0"]
FIELDS = ["epoch", "num_tokens", "lane", "entry", "cost", "strikes", "enqueued_ms", "owner"]


@pytest.mark.parametrize("field", [*FIELDS, "result_ttl_ms", "deadline_ms", "alone", "state"])
def test_whatever_is_written_into_an_own_request_others_are_served(
    mallory: QueueDriver, driver: QueueDriver, field: str
) -> None:
    """Claims, sweeps and the janitor pass over a request that its producer spoiled."""
    for number, value in enumerate(HOSTILE_VALUES):
        request_id = f"spoiled-{number}"
        mallory.enqueue(request_id, tenant=MALLORY)
        mallory.client.hset(driver.keys.request(MALLORY, request_id), field, value)
    driver.enqueue("r1", tenant=VICTIM)
    driver.janitor()
    driver.reap()
    granted = [grant for _ in range(12) for grant in driver.claim().grants]
    mine = next(grant for grant in granted if grant.tenant == VICTIM)
    driver.emit(mine)
    assert driver.finish(mine, 1).outcome.name == "OK"
    driver.client.delete(*driver.client.scan_iter(f"{driver.keys.base}:*"))  # ruins of mallory's


BOOKS = ["queued", "queued:5", "queued:5:acme", "running", "running:5:acme", "bytes", "turn",
         "turn:5", "since:5", "sweep_cursor", "janitor_cursor", "repair_cursor"]  # fmt: skip


@pytest.mark.parametrize("value", ["x", "nan", "inf", "-1e300", "1e300", str(2**63 - 1), "-5", ""])
def test_whatever_is_written_into_the_shared_books_others_are_served(
    mallory: QueueDriver, driver: QueueDriver, value: str
) -> None:
    """Turns and counts may be wrong then, but requests are taken, granted, swept and finished."""
    driver.enqueue("before", tenant=VICTIM)
    mallory.client.hset(driver.keys.stats, mapping=dict.fromkeys(BOOKS, value))
    driver.enqueue("r1", tenant=VICTIM)
    driver.janitor()
    driver.reap()
    mallory.client.hset(driver.keys.stats, "queued:5:mallory", value)
    mallory.client.zadd(driver.keys.served(5), {MALLORY: -1})  # its turn, and nothing in its lane
    granted = driver.claim().grants
    assert [grant.request_id for grant in granted] == ["before", "r1"]
    for grant in granted:
        driver.emit(grant)
        assert driver.finish(grant, 1).outcome.name == "OK"
    driver.client.delete(driver.keys.stats)


def test_an_oversized_payload_is_never_handed_to_a_worker(
    mallory: QueueDriver, driver: QueueDriver
) -> None:
    """Written past the client's checks, it is answered by the queue; the next one is granted."""
    mallory.enqueue("bomb", tenant=MALLORY, payload=bytes(2 * 1024 * 1024 + 1))
    driver.enqueue("good", tenant=VICTIM)
    assert [grant.request_id for grant in driver.claim().grants] == ["good"]
    end = driver.end("bomb", MALLORY)
    assert end.error_code is ErrorCode.UNDECODABLE
    assert "2097153 bytes" in end.error_message
