"""reprioritise: a request that waits or runs changes its lane, and nothing else about it."""

from __future__ import annotations

import pytest
from redis import Redis

from headrace.errors import TransportError
from headrace.functions import EmitOutcome, FinishOutcome, wishes
from headrace.types import RequestState
from support.queue_driver import QueueDriver
from support.queue_invariants import check_empty
from support.waiting import PATIENCE_S, eventually


def _order(driver: QueueDriver) -> list[str]:
    return [grant.request_id for grant in driver.claim().grants]


def test_a_queued_request_goes_sooner_than_it_was_asked_for(driver: QueueDriver) -> None:
    """It leaves its lane with its counts, and is granted from the other one."""
    for request_id in ("a", "b"):
        driver.enqueue(request_id, priority=9)
    assert driver.reprioritise(0, "b") is RequestState.QUEUED
    assert driver.status("b").priority == 0
    assert driver.depth().queued_by_lane == {0: 1, 9: 1}
    first = driver.grant()
    assert (first.request_id, first.priority, first.epoch) == ("b", 0, 1)


def test_it_comes_behind_what_waits_there_already(driver: QueueDriver) -> None:
    """Nobody who was there before waits longer than one place."""
    for request_id, priority in (("old", 5), ("a", 1), ("b", 1)):
        driver.enqueue(request_id, priority=priority)
    driver.reprioritise(1, "old")
    driver.enqueue("c", priority=1)
    assert _order(driver) == ["a", "b", "old", "c"]


def test_what_was_handed_back_goes_before_what_is_new(driver: QueueDriver) -> None:
    """It has tokens that somebody has read, in whatever lane it waits."""
    driver.enqueue("back", priority=9)
    grant = driver.grant()
    driver.emit(grant, 0, 2)
    driver.release(grant)
    driver.enqueue("new", priority=1)
    driver.reprioritise(1, "back")
    first = driver.grant()
    assert (first.request_id, first.num_tokens) == ("back", 2)


def test_a_running_request_stays_with_its_holder(driver: QueueDriver) -> None:
    """Epoch, lease, log and counts go on, and the holder hears of the priority."""
    driver.enqueue(priority=9)
    grant = driver.grant()
    driver.emit(grant, 0, 1)
    assert driver.reprioritise(2) is RequestState.RUNNING
    assert driver.emit(grant, 1, 1).outcome is EmitOutcome.OK
    (wish,) = driver.run(wishes(driver.keys, worker_id="w1", held=[grant.held]))
    assert (wish.priority, wish.end) == (2, None)
    assert driver.renew(grant) == ()
    assert driver.finish(grant, 2).outcome is FinishOutcome.OK
    check_empty(driver.client, driver.keys)


def test_a_vanished_holder_loses_it_from_its_new_lane(driver: QueueDriver) -> None:
    """The sweep finds the lease where it is now, and the next grant has the new priority."""
    driver.enqueue(priority=9)
    driver.grant()
    driver.reprioritise(2)
    driver.let_leases_lapse()
    grant = driver.grant("w2")
    assert (grant.priority, grant.epoch, grant.strikes) == (2, 2, 1)


def test_a_head_that_did_not_fit_moves_like_any_other(driver: QueueDriver) -> None:
    """It has been looked at by a claim, and leaves nothing behind in its old lane."""
    driver.enqueue(priority=9, cost=100)
    assert driver.claim(free_tokens=50).grants == ()
    driver.reprioritise(3)
    assert driver.client.exists(driver.keys.lane(9, "acme"), driver.keys.served(9)) == 0
    assert driver.grant().priority == 3


def test_asking_again_changes_nothing(driver: QueueDriver, client: Redis) -> None:
    """A retry after a lost reply keeps the place in the lane."""
    driver.enqueue("a", priority=9)
    driver.reprioritise(1, "a")
    driver.enqueue("b", priority=1)
    entry = client.hget(driver.keys.request("acme", "a"), "entry")
    assert driver.reprioritise(1, "a") is RequestState.QUEUED
    assert client.hget(driver.keys.request("acme", "a"), "entry") == entry


def test_an_idle_worker_is_woken(driver: QueueDriver) -> None:
    """What did not fit from its old lane may be wanted from the new one."""
    driver.enqueue(priority=9)
    cursor = driver.claim(free_tokens=1).wake_cursor
    driver.reprioritise(0)
    assert driver.client.xread({driver.keys.wake: cursor})


def test_the_holder_gets_a_hint(driver: QueueDriver, client: Redis) -> None:
    """The control channel names the request, when there is a holder."""
    with client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(driver.keys.control)
        channel.get_message(timeout=PATIENCE_S)
        driver.enqueue()
        driver.reprioritise(4)
        grant = driver.grant()
        driver.reprioritise(3)
        message = channel.get_message(timeout=PATIENCE_S)
        assert message is not None
        assert message["data"] == b"acme:r1"
        assert channel.get_message() is None
    driver.release(grant)


def test_what_has_ended_stays_as_it_was(driver: QueueDriver) -> None:
    """An end is an end, and what was never there cannot be moved."""
    driver.enqueue(priority=7)
    driver.cancel()
    assert driver.reprioritise(0) is RequestState.CANCELLED
    assert driver.status().priority == 7
    assert driver.reprioritise(0, "nobody") is None


def test_a_priority_that_does_not_exist_is_refused(driver: QueueDriver) -> None:
    """The error names it, and the request stays where it is."""
    driver.enqueue()
    with pytest.raises(TransportError, match="below 10, not 10"):
        driver.reprioritise(10)
    assert driver.depth().queued_by_lane == {5: 1}


def test_a_lane_that_is_no_stream_takes_nobody_in(driver: QueueDriver, client: Redis) -> None:
    """The call fails before it has changed anything."""
    driver.enqueue()
    client.set(driver.keys.lane(0, "acme"), "garbage")
    with pytest.raises(TransportError):
        driver.reprioritise(0)
    client.delete(driver.keys.lane(0, "acme"))
    assert eventually(lambda: driver.grant().priority) == 5
