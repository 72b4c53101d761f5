"""renew and release: a lease lasts while its holder renews, and ends at a hand-over."""

from __future__ import annotations

from dataclasses import replace

from redis import Redis

from headrace.errors import ErrorCode
from headrace.keys import GROUP
from headrace.types import RequestState
from support.queue_driver import LEASE_MS, QueueDriver
from support.waiting import eventually


def test_a_renewed_lease_is_not_taken_back(driver: QueueDriver) -> None:
    """A request that runs for many leases stays with its holder as long as that renews."""
    driver.enqueue()
    grant = driver.grant()
    lane = driver.keys.lane(5, "acme")
    (entry,) = _entry_ids(driver.client, lane)
    for _ in range(20):
        driver.client.xclaim(lane, GROUP, "w1", 0, [entry], idle=LEASE_MS * 3 // 4, justid=True)
        assert driver.renew(grant) == ()
        assert driver.reap_after(LEASE_MS // 2).requeued == ()
    assert (driver.status().epoch, driver.status().strikes) == (1, 0)


def test_a_sweep_goes_by_the_lease_of_the_holder(driver: QueueDriver) -> None:
    """A worker with a short lease strikes nobody whose own lease is long."""
    driver.enqueue("long")
    driver.claim("patient", lease_ms=60_000)
    driver.enqueue("short")
    driver.claim("hasty", lease_ms=20)
    driver.heartbeat("patient")
    found = eventually(lambda: driver.reap("hasty", lease_ms=20).requeued)
    assert [ref.request_id for ref in found] == ["short"]
    assert (driver.status("long").owner, driver.status("long").strikes) == ("patient", 0)


def test_a_renewal_tells_the_lease_again(driver: QueueDriver, client: Redis) -> None:
    """A worker whose hash was lost is judged by what it said last, not by the sweeper's lease."""
    driver.enqueue()
    grant = driver.grant()
    client.delete(driver.keys.worker("w1"))
    driver.renew(grant)
    eventually(lambda: _idle_ms(client, driver.keys.lane(5, "acme")) >= 5)
    assert driver.reap(lease_ms=1).requeued == ()
    assert client.pttl(driver.keys.worker("w1")) > 0


def test_a_holder_of_which_nothing_is_known_is_judged_by_the_sweeper(
    driver: QueueDriver, client: Redis
) -> None:
    """Its hash ended four leases after its last heartbeat: its requests go on elsewhere."""
    driver.enqueue()
    driver.grant()
    client.delete(driver.keys.worker("w1"))
    assert eventually(lambda: driver.reap(lease_ms=20).requeued)


def test_a_short_lease_does_not_wait_for_the_turn_of_a_long_one(driver: QueueDriver) -> None:
    """The sweep of a worker with a lease of a minute blocks nobody with one of a second."""
    driver.reap("patient", lease_ms=60_000)
    driver.enqueue()
    driver.claim("hasty", lease_ms=20)
    assert eventually(lambda: driver.reap("other", lease_ms=20).requeued)


def test_renewing_does_not_count_as_a_delivery(driver: QueueDriver, client: Redis) -> None:
    """Redis's delivery count is left alone: strikes are counted elsewhere."""
    driver.enqueue()
    grant = driver.grant()
    before = client.xpending_range(driver.keys.lane(5, "acme"), GROUP, "-", "+", 1)
    driver.renew(grant)
    after = client.xpending_range(driver.keys.lane(5, "acme"), GROUP, "-", "+", 1)
    assert before[0]["times_delivered"] == after[0]["times_delivered"]


def test_a_renewal_names_what_is_lost(driver: QueueDriver) -> None:
    """Of several requests, the reply holds those of another epoch, another owner, or none."""
    for number in range(3):
        driver.enqueue(f"r{number}")
    kept, finished, released = driver.claim().grants
    driver.finish(finished)
    driver.release(released)
    future = replace(kept, epoch=9)
    lost = driver.renew(kept, finished, released, future)
    assert lost == (finished.held, released.held, future.held)


def test_a_late_renewal_does_not_steal_from_the_new_holder(driver: QueueDriver) -> None:
    """A worker that was paused past its lease learns the loss, and the new lease is untouched."""
    driver.enqueue()
    old = driver.grant("w1")
    driver.let_leases_lapse()
    new = driver.grant("w2")
    assert driver.renew(old, worker_id="w1") == (old.held,)
    assert driver.renew(new, worker_id="w2") == ()
    assert driver.status().owner == "w2"


def test_a_late_release_does_not_touch_the_new_holder(driver: QueueDriver) -> None:
    """A hand-over delayed past the takeover does nothing."""
    driver.enqueue()
    old = driver.grant("w1")
    driver.let_leases_lapse()
    driver.grant("w2")
    assert driver.release(old, worker_id="w1") == 0
    assert driver.release(old, worker_id="w1", strike=True) == 0
    assert (driver.status().owner, driver.status().strikes) == ("w2", 1)


def test_a_released_request_goes_before_newer_ones(driver: QueueDriver) -> None:
    """It is claimable at once, with its tokens, at the next epoch, and without a strike."""
    driver.enqueue("r1")
    grant = driver.grant("w1")
    driver.emit(grant, 0, 4)
    driver.enqueue("r2")
    assert driver.release(grant) == 1
    first, second = driver.claim("w2").grants
    assert (first.request_id, second.request_id) == ("r1", "r2")
    assert (first.epoch, first.num_tokens, first.strikes) == (2, 4, 0)


def test_a_released_request_can_go_to_the_same_worker(driver: QueueDriver) -> None:
    """Whoever hands back may take again."""
    driver.enqueue()
    driver.release(driver.grant("w1"))
    assert driver.grant("w1").epoch == 2


def test_a_repeated_release_does_nothing(driver: QueueDriver) -> None:
    """A retry after a lost reply finds nothing to hand back, and gives no second strike."""
    driver.enqueue()
    grant = driver.grant()
    assert driver.release(grant, strike=True) == 1
    assert driver.release(grant, strike=True) == 0
    assert (driver.status().strikes, driver.depth().queued) == (1, 1)


def test_a_release_wakes_idle_workers(driver: QueueDriver, client: Redis) -> None:
    """Work that comes back is news."""
    driver.enqueue()
    grant = driver.grant()
    cursor = driver.claim("w2").wake_cursor
    driver.release(grant)
    assert client.xread({driver.keys.wake: cursor})


def test_a_cancelled_request_that_is_released_ends(driver: QueueDriver) -> None:
    """Nobody runs what somebody has cancelled."""
    driver.enqueue()
    grant = driver.grant()
    driver.cancel()
    assert driver.release(grant) == 1
    assert driver.status().state is RequestState.CANCELLED
    assert driver.end().error_code is ErrorCode.CANCELLED


def test_an_acknowledgement_by_a_stranger_is_repaired(driver: QueueDriver, client: Redis) -> None:
    """A raw XACK takes the lease away; the next renewal brings it back."""
    driver.enqueue()
    grant = driver.grant()
    lane = driver.keys.lane(5, "acme")
    client.xack(lane, GROUP, *_entry_ids(client, lane))
    assert driver.renew(grant) == ()
    assert client.xpending(lane, GROUP)["pending"] == 1


def test_an_entry_deleted_by_a_stranger_is_put_back(driver: QueueDriver, client: Redis) -> None:
    """A raw XDEL of a running request's entry loses neither the lease nor the request."""
    driver.enqueue()
    grant = driver.grant("w1")
    lane = driver.keys.lane(5, "acme")
    client.xdel(lane, *_entry_ids(client, lane))
    assert driver.renew(grant) == ()
    driver.let_leases_lapse()
    assert driver.grant("w2").epoch == 2


def test_a_lane_of_the_wrong_type_does_not_stop_the_holder(
    driver: QueueDriver, client: Redis
) -> None:
    """Without a readable lane there is no lease, but the holder can bring its request to an end."""
    driver.enqueue()
    grant = driver.grant()
    lane = driver.keys.lane(5, "acme")
    client.set(lane, "no stream")
    assert driver.renew(grant) == ()
    driver.emit(grant, 0, 1)
    driver.finish(grant, 1)
    assert driver.status().state is RequestState.FINISHED
    client.delete(lane)


def _entry_ids(client: Redis, lane: str) -> list[bytes]:
    return [entry_id for entry_id, _ in client.xrange(lane)]


def _idle_ms(client: Redis, lane: str) -> int:
    (item,) = client.xpending_range(lane, GROUP, "-", "+", 1)
    return int(item["time_since_delivered"])
