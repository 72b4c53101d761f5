"""The library as a whole: its key names are those of keys.py, its commands those of Redis 7.0."""

from __future__ import annotations

import re

from redis import Redis
from redis.crc import key_slot

from headrace.functions import LIBRARY, library_code
from headrace.keys import LANES, PERMANENT
from support.key_leaks import find_leaks
from support.queue_driver import QueueDriver

# Since 7.2 or later, or replaced by such: the floor is Redis 7.0 and Valkey 7.2.
TOO_NEW = ("XACKDEL", "XDELEX", "ACKED", "DELREF", "KEEPREF", "HEXPIRE", "HPEXPIRE", "HGETEX")


def test_every_key_has_the_name_that_keys_py_gives_it(driver: QueueDriver, client: Redis) -> None:
    """After one of everything, Redis holds these keys and no others."""
    keys = driver.keys
    driver.heartbeat("w1")
    driver.enqueue("done", priority=0)
    driver.finish(driver.grant())
    driver.enqueue("poison", priority=0)
    for _ in range(3):
        driver.die(driver.grant())
    driver.enqueue("running", priority=3, ttl_ms=50_000)
    driver.emit(driver.grant())
    driver.reap()
    assert {key.decode() for key in client.scan_iter()} == {
        *(keys.request("acme", name) for name in ("done", "poison", "running")),
        *(keys.token_log("acme", name) for name in ("done", "poison", "running")),
        *(keys.lane(3, "acme"), keys.served(3), keys.stats),
        *(keys.deadlines, keys.promotions),
        *(keys.worker("w1"), keys.workers, keys.sweep, keys.isolator, keys.wake),
        *(keys.dead, keys.dead_books),
    }


def test_all_keys_of_a_queue_live_in_one_slot_of_a_cluster(driver: QueueDriver) -> None:
    """The base key is the hash tag of every other, so a cluster keeps them together."""
    driver.enqueue()
    driver.grant()
    slots = {key_slot(key) for key in driver.client.scan_iter()}
    assert slots == {key_slot(driver.keys.base.encode())}


def test_every_priority_has_a_lane(driver: QueueDriver) -> None:
    """The library takes as many priorities as keys.py names."""
    for lane in range(LANES):
        driver.enqueue(f"r{lane}", priority=lane)
    assert set(driver.depth().queued_by_lane) == set(range(LANES))


def test_the_library_uses_commands_that_the_floor_has(client: Redis) -> None:
    """Every command in the Lua files is known to the oldest server that is supported."""
    commands = sorted(set(re.findall(r"redis\.p?call\('(\w+)'", library_code())))
    assert len(commands) > 20
    known = client.execute_command("COMMAND", "INFO", *commands)
    found = list(known.values()) if isinstance(known, dict) else known
    assert len(found) == len(commands)
    assert None not in found
    assert not [word for word in TOO_NEW if f"'{word}'" in library_code()]


def test_functions_are_flagged_for_replicas_and_full_memory(
    driver: QueueDriver, client: Redis
) -> None:
    """What only reads may run anywhere; what ends or keeps requests runs when memory is full."""
    driver.depth()
    (library,) = client.function_list(LIBRARY)
    flags = {
        _field(function, b"name").decode().removeprefix(f"{LIBRARY}_"): set(
            _field(function, b"flags")
        )
        for function in _field(library, b"functions")
    }
    reading = {name for name, given in flags.items() if b"no-writes" in given}
    freeing = {name for name, given in flags.items() if b"allow-oom" in given}
    assert reading == {"status", "depth", "list_dead", "wishes"}
    assert {"finish", "finish_now", "cancel", "reap", "renew", "release", "heartbeat"} <= freeing
    assert not {"enqueue", "claim", "emit", "replay_dead"} & freeing


def test_the_check_for_leaks_sees_a_leak(driver: QueueDriver, client: Redis) -> None:
    """A key without a TTL that is neither permanent nor part of unfinished work is found."""
    driver.enqueue("live")
    driver.enqueue("done")
    for grant in driver.claim().grants:
        driver.emit(grant)
    client.hset(driver.keys.request("acme", "done"), "state", "finished")
    client.set(f"{driver.keys.base}:sweep", "w1")
    client.set("stranger", "1")
    assert set(find_leaks(client)) == {
        *(driver.keys.request("acme", "done"), driver.keys.token_log("acme", "done")),
        *(f"{driver.keys.base}:sweep", "stranger"),
    }
    client.flushall()


def test_a_drained_queue_is_as_small_as_before(driver: QueueDriver, client: Redis) -> None:
    """Thousands of requests leave no stream, no pending entry and no memory behind."""
    _work(driver, client, 20)
    before = _size(client)
    _work(driver, client, 1000)
    assert _size(client) <= before * 1.05 + 4096
    assert {key.decode().split(":")[1] for key in client.scan_iter()} <= PERMANENT | {"worker"}


def _work(driver: QueueDriver, client: Redis, number: int) -> None:
    for start in range(0, number, 8):
        for index in range(start, start + 8):
            driver.enqueue(f"r{index}", tenant=f"t{index % 3}")
        for grant in driver.claim().grants:
            driver.emit(grant)
            driver.finish(grant, 1)
    for kind in ("req", "out"):  # as their TTLs would
        for key in client.scan_iter(f"{driver.keys.base}:{kind}:*", count=1000):
            client.delete(key)


def _size(client: Redis) -> int:
    return sum(int(client.memory_usage(key) or 0) for key in client.scan_iter(count=1000))


def _field(pairs: object, name: bytes) -> object:
    if isinstance(pairs, dict):
        return pairs[name]
    assert isinstance(pairs, list)
    return pairs[pairs.index(name) + 1]
