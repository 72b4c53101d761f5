"""Known failures of job queues, replayed against the functions: "(queue Bnn)" names the row."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from redis import Redis

from headrace.functions import FinishOutcome
from headrace.keys import GROUP
from headrace.types import RequestState
from support.queue_driver import QueueDriver
from support.queue_invariants import check_empty
from support.waiting import eventually


def test_much_work_leaves_memory_where_it_was(driver: QueueDriver, client: Redis) -> None:
    """The second thousand requests take no more than the first, within 5 % (queue B30)."""
    _work_off(driver, 1000)
    client.memory_purge()
    before = client.info("memory")["used_memory"]
    _work_off(driver, 1000)
    check_empty(client, driver.keys)
    assert client.info("memory")["used_memory"] <= 1.05 * before
    assert client.dbsize() <= 4


def test_what_has_ended_is_not_run_again_when_old_entries_come_back(
    driver: QueueDriver, client: Redis
) -> None:
    """A failover brings the lane entries of ended requests back: they are put away (queue B34)."""
    driver.enqueue("done")
    driver.enqueue("live")
    done, live = driver.claim().grants
    lane = driver.keys.lane(5, "acme")
    old = client.xrange(lane)
    driver.finish(done)
    client.delete(lane)  # as the new master has it: the stream of before, its group at the start
    for entry_id, fields in old:
        client.xadd(lane, fields, id=entry_id)
    client.xgroup_create(lane, GROUP, "0")
    driver.janitor()
    assert driver.claim("w2").grants == ()
    assert driver.status("live").owner == "w1"
    assert driver.finish(live).outcome is FinishOutcome.OK
    assert not client.exists(lane)


def test_a_hand_over_and_a_sweep_at_once_are_one_takeover(driver: QueueDriver) -> None:
    """Whoever tells first, there is one strike and one active epoch (queue B38)."""
    for number in range(50):
        driver.enqueue(f"r{number}")
    grants = driver.claim("gone", free_seqs=50).grants
    with ThreadPoolExecutor(2) as pool:
        told = [pool.submit(driver.release, g, worker_id="gone", strike=True) for g in grants]
        pool.submit(driver.let_leases_lapse).result()
        for one in told:
            one.result()
    again = driver.claim("w1", free_seqs=50).grants
    assert {(grant.epoch, grant.strikes) for grant in again} == {(2, 1)}
    assert driver.claim("w2", free_seqs=50).grants == ()


def test_an_abandoned_second_group_keeps_nothing(driver: QueueDriver, client: Redis) -> None:
    """Entries go with their requests, whoever else once read the lane (queue B46)."""
    driver.enqueue("stays")
    held = driver.grant()
    lane = driver.keys.lane(5, "acme")
    client.xgroup_create(lane, "monitor", "0")
    client.xreadgroup("monitor", "somebody", {lane: ">"})
    _work_off(driver, 200)
    assert client.xlen(lane) == 1
    driver.finish(held)
    assert not client.exists(lane)


def test_a_result_is_kept_for_its_ttl_however_long_it_waited(
    driver: QueueDriver, client: Redis
) -> None:
    """In the queue for longer than the TTL, it is readable for the whole TTL (queue B50)."""
    driver.enqueue(result_ttl_ms=60_000)
    request, an_hour_ms = driver.keys.request("acme", "r1"), 3_600_000
    client.hset(request, "enqueued_ms", driver.clock_ms() - an_hour_ms)
    driver.emit(grant := driver.grant(), 0, 3)
    assert client.pttl(request) == client.pttl(driver.keys.token_log("acme", "r1")) == -1
    driver.finish(grant, 3)
    assert client.pttl(driver.keys.token_log("acme", "r1")) > 30_000
    assert driver.tokens() == [0, 1, 2]
    assert driver.status().state is RequestState.FINISHED


def _work_off(driver: QueueDriver, count: int) -> None:
    """Run so many requests to their ends, whose results do not stay."""
    for number in range(count):
        driver.enqueue(f"job{number}", tenant="acme", result_ttl_ms=1)
    left = count
    while left:
        for grant in driver.claim("w1", free_seqs=100).grants:
            driver.finish(grant)
            left -= 1
    keys = driver.keys
    eventually(lambda: not list(driver.client.scan_iter(f"{keys.base}:*:acme:job*", count=10_000)))
