"""claim: a worker gets what fits, once, however often the reply is lost."""

from __future__ import annotations

import pytest
from redis import Redis

from headrace.errors import ErrorCode, TransportError
from headrace.keys import GROUP
from headrace.types import RequestState
from support.queue_driver import QueueDriver
from support.waiting import eventually


def test_a_grant_tells_all_that_a_worker_needs(driver: QueueDriver) -> None:
    """A grant carries payload, epoch, offset and the clock of Redis."""
    driver.enqueue("r1", payload=b"body", cost=7, priority=2, ttl_ms=9000, attached=False)
    grant = driver.grant("w1")
    assert (grant.tenant, grant.request_id, grant.payload) == ("acme", "r1", b"body")
    assert (grant.epoch, grant.num_tokens, grant.strikes) == (1, 0, 0)
    assert (grant.cost, grant.priority, grant.attached) == (7, 2, False)
    assert grant.deadline_ms == grant.enqueued_ms + 9000
    assert grant.now_ms >= grant.enqueued_ms
    status = driver.status("r1")
    assert (status.state, status.owner, status.epoch) == (RequestState.RUNNING, "w1", 1)
    assert status.started_at_s == grant.now_ms / 1000


def test_an_empty_queue_grants_nothing(driver: QueueDriver, client: Redis) -> None:
    """Claiming from nothing is no error and leaves nothing behind."""
    reply = driver.claim()
    assert (reply.grants, reply.wake_cursor) == ((), "0-0")
    assert client.dbsize() == 0


def test_the_same_nonce_gets_the_same_grants(driver: QueueDriver) -> None:
    """A claim whose reply was lost is asked again, and nothing is granted twice or lost."""
    for number in range(6):
        driver.enqueue(f"r{number}")
    first = driver.claim(nonce="lost", free_seqs=3)
    again = driver.claim(nonce="lost", free_seqs=3)
    assert [grant.held for grant in again.grants] == [grant.held for grant in first.grants]
    assert [grant.payload for grant in again.grants] == [grant.payload for grant in first.grants]
    assert (driver.depth().queued, driver.depth().running) == (3, 3)


def test_a_repeated_claim_leaves_out_what_was_lost_since(driver: QueueDriver) -> None:
    """The second answer holds only grants that are still good."""
    driver.enqueue("r1")
    driver.enqueue("r2")
    first, second = driver.claim(nonce="lost").grants
    driver.release(first)
    again = driver.claim(nonce="lost")
    assert [grant.held for grant in again.grants] == [second.held]


def test_another_nonce_gets_other_grants(driver: QueueDriver) -> None:
    """Two claims of one worker do not share a request."""
    driver.enqueue("r1")
    driver.enqueue("r2")
    assert driver.grant().request_id == "r1"
    assert driver.grant().request_id == "r2"


def test_no_more_is_granted_than_there_are_free_sequences(driver: QueueDriver) -> None:
    """COUNT of XREADGROUP is per stream; the bound of a claim is over all lanes and tenants."""
    for lane in range(3):
        for tenant in ("acme", "zeta"):
            for number in range(4):
                driver.enqueue(f"r{lane}{number}", tenant=tenant, priority=lane)
    assert len(driver.claim(free_seqs=4).grants) == 4
    assert (driver.depth().queued, driver.depth().running) == (20, 4)


def test_a_claim_stops_at_the_first_request_that_does_not_fit(driver: QueueDriver) -> None:
    """A smaller request does not pass a big one; the big one keeps its place, without a strike."""
    driver.enqueue("small", cost=60)
    driver.enqueue("big", cost=50)
    driver.enqueue("tiny", cost=10)
    held = driver.claim(free_tokens=100).grants
    assert [grant.request_id for grant in held] == ["small"]
    later = driver.claim("w2", free_tokens=100).grants
    assert [(grant.request_id, grant.strikes) for grant in later] == [("big", 0), ("tiny", 0)]


def test_a_request_bigger_than_the_worker_runs_on_an_empty_one(driver: QueueDriver) -> None:
    """A cost above the whole cache is taken as the whole cache."""
    driver.enqueue("huge", cost=10**6)
    assert driver.claim(free_tokens=999, total_tokens=1000).grants == ()
    assert driver.grant(free_tokens=1000, total_tokens=1000).request_id == "huge"


def test_requests_from_before_the_first_worker_are_served(driver: QueueDriver) -> None:
    """The consumer group begins at the first entry, not at its own birth."""
    for number in range(100):
        driver.enqueue(f"r{number}")
    granted = [g.request_id for _ in range(13) for g in driver.claim().grants]
    assert granted == [f"r{number}" for number in range(100)]


def test_a_lost_group_is_made_again_without_running_anything_twice(
    driver: QueueDriver, client: Redis
) -> None:
    """A request whose group vanished stays with its holder; the waiting ones are granted."""
    driver.enqueue("held")
    grant = driver.grant("w1")
    driver.enqueue("waiting")
    client.xgroup_destroy(driver.keys.lane(5, "acme"), GROUP)
    assert [g.request_id for g in driver.claim("w2").grants] == ["waiting"]
    assert driver.emit(grant).offset == 1
    assert driver.status("held").owner == "w1"


def test_wiped_data_does_not_stop_the_queue(driver: QueueDriver, client: Redis) -> None:
    """After FLUSHALL, workers claim as before and new requests are served."""
    driver.enqueue("old")
    grant = driver.grant()
    client.flushall()
    assert driver.claim().grants == ()
    assert driver.renew(grant) == (grant.held,)
    driver.enqueue("new")
    assert driver.grant().request_id == "new"


def test_an_expired_request_is_closed_and_not_granted(driver: QueueDriver) -> None:
    """The claim writes the terminal entry and goes on to the next request."""
    driver.enqueue("late", ttl_ms=1)
    driver.enqueue("good")
    eventually(lambda: _now_s(driver) > (driver.status("late").deadline_at_s or 0))
    assert [grant.request_id for grant in driver.claim().grants] == ["good"]
    assert driver.end("late").error_code is ErrorCode.DEADLINE_EXCEEDED


def test_a_request_without_its_hash_is_reported_lost(driver: QueueDriver, client: Redis) -> None:
    """An orphan entry is acknowledged, its readers are told, and the others are served."""
    driver.enqueue("orphan")
    driver.enqueue("good")
    client.delete(driver.keys.request("acme", "orphan"))
    assert [grant.request_id for grant in driver.claim().grants] == ["good"]
    assert driver.end("orphan").error_code is ErrorCode.LOST
    assert driver.depth().queued == 0


def test_a_lane_of_the_wrong_type_is_reported_while_others_go_on(
    driver: QueueDriver, client: Redis
) -> None:
    """One broken lane neither stops the claim nor goes unnoticed."""
    driver.enqueue("stuck", tenant="broken", priority=0)
    driver.enqueue("good", tenant="acme", priority=1)
    lane = driver.keys.lane(0, "broken")
    client.set(lane, "no stream")
    reply = driver.claim()
    assert [grant.request_id for grant in reply.grants] == ["good"]
    assert reply.broken_lanes == (lane,)
    client.delete(lane)
    driver.janitor()
    assert driver.grant().request_id == "stuck"


def test_many_closed_requests_do_not_leave_a_worker_asleep(driver: QueueDriver) -> None:
    """A claim that spent itself on dead entries returns a cursor that wakes at once."""
    for number in range(100):
        driver.enqueue(f"r{number}", payload=b"x")
    driver.enqueue("good")
    with driver.client.pipeline() as pipe:
        for number in range(100):
            pipe.delete(driver.keys.request("acme", f"r{number}"))
        pipe.execute()
    first = driver.claim()
    assert (first.grants, first.wake_cursor) == ((), "0-0")
    assert driver.client.xread({driver.keys.wake: first.wake_cursor})
    assert driver.grant().request_id == "good"


@pytest.mark.parametrize(
    "options",
    [{"free_seqs": -1}, {"free_tokens": -1}, {"total_tokens": 0}, {"lease_ms": 0}],
)
def test_a_claim_with_bad_room_is_refused(driver: QueueDriver, options: dict[str, int]) -> None:
    """Numbers out of range are named, and nothing is granted."""
    driver.enqueue()
    with pytest.raises(TransportError, match=next(iter(options))):
        driver.claim(**options)
    assert driver.depth().queued == 1


def test_a_worker_cannot_take_the_name_of_the_requeued(driver: QueueDriver) -> None:
    """Names with a leading underscore belong to the queue."""
    with pytest.raises(TransportError, match="_requeued"):
        driver.claim("_requeued")


def _now_s(driver: QueueDriver) -> float:
    seconds, micros = driver.client.time()
    return seconds + micros / 1e6
