"""cancel, status and depth: what a client asks of a request, and an operator of the queue."""

from __future__ import annotations

import pytest
from redis import Redis

from headrace.errors import ErrorCode
from headrace.functions import FinishOutcome, TenantDepth, status
from headrace.types import FinishReason, RequestState
from support.queue_driver import QueueDriver
from support.queue_invariants import check_empty
from support.waiting import PATIENCE_S


def test_a_queued_request_is_cancelled_at_once(driver: QueueDriver) -> None:
    """It ends with a terminal entry, is never granted, and leaves its lane."""
    driver.enqueue()
    assert driver.cancel() is RequestState.CANCELLED
    end = driver.end()
    assert (end.finish_reason, end.error_code) == (FinishReason.CANCELLED, ErrorCode.CANCELLED)
    assert driver.claim().grants == ()
    check_empty(driver.client, driver.keys)


def test_a_request_that_was_handed_back_is_cancelled_at_once(driver: QueueDriver) -> None:
    """Between two holders a request is queued, and its tokens stay readable."""
    driver.enqueue()
    grant = driver.grant()
    driver.emit(grant, 0, 2)
    driver.release(grant)
    assert driver.cancel() is RequestState.CANCELLED
    assert [entry_id for entry_id, _, _ in driver.log()] == ["2-0", "2-1"]


def test_a_running_request_is_cancelled_by_its_holder(driver: QueueDriver) -> None:
    """The flag is raised, and the holder writes the one terminal entry."""
    driver.enqueue()
    grant = driver.grant()
    assert driver.cancel() is RequestState.RUNNING
    assert driver.status().state is RequestState.RUNNING
    reply = driver.finish(grant, state=RequestState.CANCELLED)
    assert reply.outcome is FinishOutcome.OK
    assert driver.status().state is RequestState.CANCELLED


def test_cancelling_again_changes_nothing(driver: QueueDriver) -> None:
    """A retry after a lost reply is answered with the state."""
    driver.enqueue()
    assert driver.cancel() is driver.cancel() is RequestState.CANCELLED
    assert len(driver.log()) == 1


def test_a_finished_request_stays_finished(driver: QueueDriver) -> None:
    """Cancelling too late is no error and takes nothing away."""
    driver.enqueue()
    driver.finish(driver.grant())
    assert driver.cancel() is RequestState.FINISHED


def test_an_unknown_request_cannot_be_cancelled(driver: QueueDriver) -> None:
    """The answer is that nobody knows it."""
    assert driver.cancel("nobody") is None


def test_workers_get_a_hint_of_a_cancel(driver: QueueDriver, client: Redis) -> None:
    """The control channel names the request, once, and only when somebody runs it."""
    with client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(driver.keys.control)
        channel.get_message(timeout=PATIENCE_S)
        driver.enqueue("a:b")
        driver.grant()
        driver.cancel("a:b")
        driver.cancel("a:b")
        message = channel.get_message(timeout=PATIENCE_S)
        assert message is not None
        assert message["data"] == b"acme:a:b"
        assert channel.get_message() is None
    driver.client.delete(driver.keys.worker("w1"))


def test_status_of_an_unknown_request_is_none(driver: QueueDriver) -> None:
    """The queue does not make up a request."""
    assert driver.run(status(driver.keys, tenant="acme", request_id="nobody")) is None


def test_status_tells_how_a_request_ended(driver: QueueDriver) -> None:
    """Times, reason, code and message are those of the end."""
    driver.enqueue()
    driver.cancel()
    found = driver.status()
    assert found.finished_at_s is not None
    assert found.finished_at_s >= found.enqueued_at_s
    assert found.finish_reason is FinishReason.CANCELLED
    assert found.error_code == "cancelled"
    assert found.error_message
    assert (found.started_at_s, found.deadline_at_s) == (None, None)


def test_status_and_depth_write_nothing(driver: QueueDriver, client: Redis) -> None:
    """They run as read-only calls, which a replica may answer."""
    driver.enqueue()
    before = client.info("persistence")["rdb_changes_since_last_save"]
    driver.status()
    driver.depth()
    assert client.info("persistence")["rdb_changes_since_last_save"] == before


def test_depth_counts_by_state_lane_and_tenant(driver: QueueDriver) -> None:
    """Counts are exact, and tenants without work are not listed."""
    for tenant, number, priority in (("acme", 3, 0), ("zeta", 2, 9), ("done", 1, 0)):
        for index in range(number):
            driver.enqueue(f"r{index}", tenant=tenant, priority=priority, payload=b"1234")
    driver.cancel("r0", tenant="done")
    driver.grant()
    depth = driver.depth()
    assert (depth.queued, depth.running, depth.payload_bytes) == (4, 1, 20)
    assert depth.queued_by_lane == {0: 2, 9: 2}
    assert depth.by_tenant == {"acme": TenantDepth(2, 1), "zeta": TenantDepth(2, 0)}


def test_depth_is_right_where_the_length_of_a_stream_is_not(
    driver: QueueDriver, client: Redis
) -> None:
    """Deletions in the middle, hand-backs and failed fits do not move the count."""
    for number in range(10):
        driver.enqueue(f"r{number}")
    for number in (3, 5, 7):
        driver.cancel(f"r{number}")
    driver.release(driver.grant())
    driver.claim(free_tokens=1)
    assert client.xlen(driver.keys.lane(5, "acme")) == 7
    assert (driver.depth().queued, driver.depth().running) == (7, 0)


@pytest.mark.parametrize("request_id", ["order:42/1", "a=b@c+d", "…".encode().hex()])
def test_ids_may_hold_colons_and_the_like(driver: QueueDriver, request_id: str) -> None:
    """An id that looks like part of a key name is not mistaken for one."""
    driver.enqueue(request_id, ttl_ms=50_000)
    driver.emit(driver.grant(), 0, 1)
    assert driver.status(request_id).num_tokens == 1
    driver.cancel(request_id)
    driver.release(*driver.claim(nonce="none").grants)


def test_a_request_without_a_payload_ends_like_any_other(driver: QueueDriver) -> None:
    """Nothing to count is no reason to stop half way: cancel, finish and counts all work."""
    for request_id in ("waits", "runs"):
        driver.enqueue(request_id, payload=b"")
    assert driver.cancel("waits") is RequestState.CANCELLED
    driver.finish(driver.grant())
    assert driver.status("runs").state is RequestState.FINISHED
    assert (driver.depth().queued, driver.depth().running) == (0, 0)
