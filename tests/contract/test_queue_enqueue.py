"""enqueue: a request is accepted once, however often it is sent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from redis import Redis

from headrace.errors import ErrorCode, QueueBound, TransportError
from headrace.functions import EnqueueOutcome
from headrace.types import FinishReason, RequestState
from support.queue_driver import QueueDriver
from support.waiting import eventually


def test_a_new_request_waits_in_its_lane(driver: QueueDriver) -> None:
    """An accepted request is queued, with the times and numbers that status tells."""
    reply = driver.enqueue("r1", priority=3)
    status = driver.status("r1")
    assert (reply.outcome, reply.state) == (EnqueueOutcome.OK, RequestState.QUEUED)
    assert (status.state, status.priority, status.epoch) == (RequestState.QUEUED, 3, 0)
    assert (status.owner, status.num_tokens, status.strikes) == (None, 0, 0)
    assert driver.depth().queued_by_lane == {3: 1}


def _queued(driver: QueueDriver) -> RequestState:
    return RequestState.QUEUED


def _running(driver: QueueDriver) -> RequestState:
    driver.grant()
    return RequestState.RUNNING


def _done(driver: QueueDriver) -> RequestState:
    driver.finish(driver.grant())
    return RequestState.FINISHED


def _expired(driver: QueueDriver) -> RequestState:
    driver.finish(driver.grant())
    driver.client.delete(driver.keys.token_log("acme", "r1"))  # as its TTL would
    return RequestState.FINISHED


STAGES = pytest.mark.parametrize("stage", [_queued, _running, _done, _expired])


@STAGES
def test_the_same_request_again_is_a_duplicate(driver: QueueDriver, stage) -> None:
    """The same id with the same payload attaches, at every stage, and runs nothing anew."""
    driver.enqueue("r1")
    state = stage(driver)
    reply = driver.enqueue("r1")
    assert (reply.outcome, reply.state) == (EnqueueOutcome.DUPLICATE, state)
    assert driver.depth().queued == (1 if state is RequestState.QUEUED else 0)
    if stage is _expired:
        driver.client.delete(driver.keys.request("acme", "r1"))


@STAGES
def test_the_same_id_with_another_payload_is_a_conflict(driver: QueueDriver, stage) -> None:
    """An id never names two things, at no stage, not even when its result has expired."""
    driver.enqueue("r1", payload=b"one")
    state = stage(driver)
    reply = driver.enqueue("r1", payload=b"two")
    assert (reply.outcome, reply.state) == (EnqueueOutcome.CONFLICT, state)
    if stage is _expired:
        driver.client.delete(driver.keys.request("acme", "r1"))


def test_an_id_that_is_forgotten_altogether_can_be_used_again(driver: QueueDriver) -> None:
    """When the tombstone is gone too, the id is unknown, and a request may take it."""
    driver.enqueue("r1", result_ttl_ms=1)
    driver.finish(driver.grant())
    eventually(lambda: not driver.client.exists(driver.keys.request("acme", "r1")))
    assert driver.enqueue("r1").outcome is EnqueueOutcome.OK
    assert driver.grant().epoch == 1


def test_the_same_id_of_two_tenants_is_two_requests(driver: QueueDriver) -> None:
    """Tenants do not share ids."""
    driver.enqueue("r1", tenant="acme", payload=b"one")
    reply = driver.enqueue("r1", tenant="zeta", payload=b"two")
    assert reply.outcome is EnqueueOutcome.OK
    assert {grant.payload for grant in driver.claim().grants} == {b"one", b"two"}


def test_sixteen_producers_of_one_request_start_one_run(driver: QueueDriver) -> None:
    """Of many enqueues of one request at once, one is accepted and the others attach."""
    driver.depth()  # loads the library
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda _: driver.enqueue("r1"), range(64)))
    outcomes = [reply.outcome for reply in replies]
    assert outcomes.count(EnqueueOutcome.OK) == 1
    assert outcomes.count(EnqueueOutcome.DUPLICATE) == 63


def test_a_full_queue_takes_no_more_and_says_when_to_come_back(driver: QueueDriver) -> None:
    """At the bound, a new request is refused with a time to wait, and leaves no trace."""
    driver.enqueue("r1", max_queued=1)
    reply = driver.enqueue("r2", max_queued=1)
    assert (reply.outcome, reply.state) == (EnqueueOutcome.FULL, None)
    assert reply.retry_after_s is not None
    assert reply.retry_after_s > 0
    assert not driver.client.exists(driver.keys.request("acme", "r2"))


def test_a_tenant_at_its_bound_does_not_shut_out_others(driver: QueueDriver) -> None:
    """What it has queued in all lanes counts, what runs does not; the answer says whose bound."""
    both = {"max_queued": 4, "max_queued_per_tenant": 2}
    for name, priority in (("r1", 0), ("r2", 9)):
        driver.enqueue(name, priority=priority, **both)
    reply = driver.enqueue("r3", **both)
    assert (reply.outcome, reply.bound) == (EnqueueOutcome.FULL, QueueBound.TENANT)
    assert driver.enqueue("r1", **both).outcome is EnqueueOutcome.DUPLICATE
    for name in ("r1", "r2"):
        assert driver.enqueue(name, tenant="zeta", **both).outcome is EnqueueOutcome.OK
    assert driver.enqueue("r1", tenant="third", **both).bound is QueueBound.QUEUE
    driver.grant()
    assert driver.enqueue("r3", **both).outcome is EnqueueOutcome.OK


def test_a_full_queue_still_knows_what_it_holds(driver: QueueDriver) -> None:
    """A retry of an accepted request is a duplicate even when the queue is full."""
    driver.enqueue("r1", max_queued=1)
    assert driver.enqueue("r1", max_queued=1).outcome is EnqueueOutcome.DUPLICATE


def test_a_deadline_is_counted_by_the_clock_of_redis(driver: QueueDriver) -> None:
    """ttl_ms runs from the enqueue; of two limits the earlier one counts."""
    driver.enqueue("r1", ttl_ms=5000)
    driver.enqueue("r2", ttl_ms=5000, deadline_ms=2**52)
    for request_id in ("r1", "r2"):
        status = driver.status(request_id)
        assert status.deadline_at_s == pytest.approx(status.enqueued_at_s + 5)


def test_a_request_that_is_late_already_ends_at_once(driver: QueueDriver) -> None:
    """A deadline in the past is answered by a terminal entry, not by silence."""
    assert driver.enqueue("r1", deadline_ms=1).state is RequestState.FAILED
    end = driver.end("r1")
    assert (end.finish_reason, end.error_code) == (
        FinishReason.ERROR,
        ErrorCode.DEADLINE_EXCEEDED,
    )
    assert driver.depth().queued == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("priority", 10),
        ("priority", -1),
        ("priority", "soon"),
        ("cost", 0),
        ("cost", "1.5"),
        ("cost", "nan"),
        ("cost", "inf"),
        ("result_ttl_ms", 0),
        ("ttl_ms", -1),
        ("max_queued", 0),
        ("max_queued_per_tenant", 0),
        ("tenant", "a:b"),
        ("request_id", ""),
    ],
)
def test_a_bad_argument_is_refused_before_anything_is_written(
    driver: QueueDriver, client: Redis, option: str, value: object
) -> None:
    """The refusal names the argument, and Redis holds nothing afterwards."""
    with pytest.raises(TransportError, match=f"{option.replace('_', '.')}") as refusal:
        driver.enqueue(**{option: value})
    assert not refusal.value.retryable_later
    assert client.dbsize() == 0


def test_idle_workers_are_woken(driver: QueueDriver, client: Redis) -> None:
    """A worker that reads the wake stream from its claim's cursor sees a later enqueue."""
    driver.enqueue("r0")
    cursor = driver.claim().wake_cursor
    assert not client.xread({driver.keys.wake: cursor})
    driver.enqueue("r1")
    assert client.xread({driver.keys.wake: cursor})
    assert client.xlen(driver.keys.wake) == 1
