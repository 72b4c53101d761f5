"""Promotion: a request whose deadline comes near is served sooner, and the counts stay true."""

from __future__ import annotations

import pytest
from redis import Redis

from headrace.functions import Grant, wishes
from headrace.types import RequestState
from support.queue_driver import QueueDriver
from support.queue_invariants import check_empty
from support.waiting import eventually

TTL_MS = 60_000  # far enough off for nothing to expire in a test


def _let_most_of_its_time_pass(
    driver: QueueDriver, request_id: str = "r1", until_promotion_ms: int = -TTL_MS // 4
) -> None:
    """Make a request that was enqueued now an old one, which is to move so soon, or was to."""
    key, name = driver.keys.request("acme", request_id), f"acme:{request_id}"
    enqueued = int(driver.client.hget(key, "enqueued_ms") or 0)
    age_ms = 3 * TTL_MS - 4 * until_promotion_ms
    driver.client.hset(key, "enqueued_ms", enqueued - age_ms)
    driver.client.zadd(driver.keys.promotions, {name: enqueued + until_promotion_ms})


def _claim_nothing(driver: QueueDriver) -> None:
    assert driver.claim(free_tokens=0).grants == ()


@pytest.mark.parametrize(("before", "after"), [(9, 4), (5, 2), (2, 1), (1, 0)])
def test_with_a_quarter_of_its_time_left_a_request_moves_half_way_up(
    driver: QueueDriver, before: int, after: int
) -> None:
    """Its entry and its counts are in the sooner lane, and only there."""
    driver.enqueue(priority=before, ttl_ms=TTL_MS)
    _claim_nothing(driver)
    assert driver.depth().queued_by_lane == {before: 1}
    _let_most_of_its_time_pass(driver)
    _claim_nothing(driver)
    assert driver.depth().queued_by_lane == {after: 1}
    grant = driver.grant()
    assert (grant.priority, grant.epoch) == (after, 1)
    driver.finish(grant)
    check_empty(driver.client, driver.keys)


def test_the_time_is_measured_by_the_clock_of_redis(driver: QueueDriver) -> None:
    """Three quarters of the way from enqueue to deadline, without anybody's help."""
    driver.enqueue(priority=8, ttl_ms=4000)
    status = driver.status()
    assert driver.client.zscore(driver.keys.promotions, "acme:r1") == pytest.approx(
        status.enqueued_at_s * 1000 + 3000
    )


def test_it_happens_by_itself_and_once(driver: QueueDriver) -> None:
    """However near the deadline comes, bulk work does not reach those who wait at a screen."""
    driver.enqueue(priority=8, ttl_ms=TTL_MS)
    _let_most_of_its_time_pass(driver, until_promotion_ms=500)

    def is_promoted() -> bool:
        _claim_nothing(driver)
        return driver.status().priority == 4

    eventually(is_promoted)
    _claim_nothing(driver)
    assert driver.status().priority == 4
    assert driver.client.exists(driver.keys.promotions) == 0


def test_it_goes_before_what_is_new_in_its_lane(driver: QueueDriver) -> None:
    """Those who have time wait for the one who has none."""
    driver.enqueue("hurried", priority=8, ttl_ms=TTL_MS)
    for name in ("a", "b"):
        driver.enqueue(name, priority=4)
    _let_most_of_its_time_pass(driver, "hurried")
    assert [g.request_id for g in driver.claim().grants] == ["hurried", "a", "b"]


def test_the_soonest_lane_and_requests_without_a_deadline_have_no_promotion(
    driver: QueueDriver,
) -> None:
    """Nothing is kept for what cannot move."""
    driver.enqueue("soonest", priority=0, ttl_ms=TTL_MS)
    driver.enqueue("undated", priority=9)
    driver.enqueue("late", priority=9, deadline_ms=1)
    assert driver.client.exists(driver.keys.promotions) == 0


def _running(driver: QueueDriver) -> Grant:
    driver.enqueue(priority=8, ttl_ms=TTL_MS)
    return driver.grant()


def test_what_runs_moves_with_its_holder(driver: QueueDriver) -> None:
    """The holder learns the new rank, and what it hands back waits in the sooner lane."""
    grant = _running(driver)
    _let_most_of_its_time_pass(driver)
    _claim_nothing(driver)
    (wish,) = driver.run(wishes(driver.keys, worker_id="w1", held=[grant.held]))
    assert (wish.priority, driver.status().owner) == (4, "w1")
    driver.release(grant)
    assert driver.depth().queued_by_lane == {4: 1}


@pytest.mark.parametrize("how", ["cancel", "finish_now"])
def test_what_ends_before_is_not_promoted(driver: QueueDriver, how: str) -> None:
    """No trace of the plan is left."""
    driver.enqueue(priority=8, ttl_ms=TTL_MS)
    assert getattr(driver, how)() in (RequestState.CANCELLED, RequestState.FINISHED)
    assert driver.client.exists(driver.keys.promotions) == 0
    check_empty(driver.client, driver.keys)


def test_a_promotion_that_was_written_by_hand_moves_nobody(
    driver: QueueDriver, client: Redis
) -> None:
    """Its own times say when a request moves; what is no request is thrown away."""
    driver.enqueue(priority=8, ttl_ms=TTL_MS)
    driver.enqueue("undated", priority=7)
    client.zadd(driver.keys.promotions, {"acme:r1": 1, "acme:undated": 1, "garbage": 1, "a:b": 1})
    _claim_nothing(driver)
    assert driver.depth().queued_by_lane == {7: 1, 8: 1}
    assert client.zrange(driver.keys.promotions, 0, -1) == [b"acme:r1"]


def test_a_sooner_lane_that_is_no_stream_stops_no_claim(driver: QueueDriver, client: Redis) -> None:
    """The request stays in its own lane, and is granted from there."""
    driver.enqueue(priority=8, ttl_ms=TTL_MS)
    client.set(driver.keys.lane(4, "acme"), "garbage")
    _let_most_of_its_time_pass(driver)
    assert driver.grant().priority == 8
    client.delete(driver.keys.lane(4, "acme"))
