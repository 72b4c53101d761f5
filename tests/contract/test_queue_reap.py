"""reap: what a vanished holder held runs again, but what kills its holders not for ever."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from redis import Redis

from headrace.errors import ErrorCode
from headrace.functions import Grant, ReapReply, RequestRef
from headrace.types import RequestState
from support.queue_driver import QueueDriver
from support.queue_invariants import check_empty
from support.waiting import eventually


def test_a_vanished_holder_loses_its_requests(driver: QueueDriver) -> None:
    """After the lease, the request is claimable before newer ones, with a strike and its tokens."""
    driver.enqueue("r1")
    driver.emit(driver.grant("w1"), 0, 3)
    driver.enqueue("r2")
    assert driver.let_leases_lapse().requeued == (RequestRef("acme", "r1"),)
    first = driver.grant("w2")
    assert (first.request_id, first.epoch, first.num_tokens, first.strikes) == ("r1", 2, 3, 1)


def test_a_live_lease_is_left_alone(driver: QueueDriver) -> None:
    """Sweeping before the lease has run out changes nothing."""
    driver.enqueue()
    driver.grant()
    for _ in range(3):
        assert driver.reap() == ReapReply((), (), ())
    assert driver.status().owner == "w1"


def test_waiting_requests_are_not_swept(driver: QueueDriver) -> None:
    """Neither new nor handed-back requests have a lease, so waiting earns no strikes."""
    driver.enqueue("back")
    driver.release(driver.grant())
    driver.enqueue("new")
    driver.claim(free_tokens=1)  # too small for either: both have been looked at
    assert driver.reap_after(1).requeued == ()
    assert {g.strikes for g in driver.claim().grants} == {0}


def test_one_worker_sweeps_at_a_time(driver: QueueDriver) -> None:
    """Within a quarter of a lease, the second caller has nothing to do."""
    driver.enqueue()
    driver.grant()
    driver.reap("w8", lease_ms=40_000)
    assert driver.reap_after(40_000, "w9").requeued == ()
    assert eventually(lambda: driver.reap_after(1, "w8").requeued)


def test_eight_sweepers_of_many_lapsed_leases_grant_each_epoch_once(driver: QueueDriver) -> None:
    """However many workers sweep and claim at once, no request runs twice at one epoch."""
    for number in range(200):
        driver.enqueue(f"r{number}")
    while driver.claim(
        "gone", lease_ms=1, free_seqs=100, free_tokens=10**6, total_tokens=10**6
    ).grants:
        pass
    workers = [f"w{number}" for number in range(8)]

    def take(worker: str) -> list[Grant]:
        grants: list[Grant] = []
        while driver.depth().queued or driver.status("r199").owner == "gone":
            driver.reap(worker, lease_ms=4, count=40)
            grants += driver.claim(worker, free_seqs=25).grants
            driver.renew(*grants, worker_id=worker)
        return grants

    with ThreadPoolExecutor(8) as pool:
        granted = [grant for grants in pool.map(take, workers) for grant in grants]
    names = [(grant.request_id, grant.epoch) for grant in granted]
    assert len(set(names)) == len(names)
    assert {name for name, epoch in names if epoch == 2} == {f"r{n}" for n in range(200)}


def test_a_sweep_takes_small_bites_and_goes_on_where_it_stopped(driver: QueueDriver) -> None:
    """A bounded sweep reaches every lane and tenant in turn."""
    for number in range(30):
        driver.enqueue(f"r{number}", tenant=f"t{number % 6}", priority=number % 10)
    driver.claim(free_seqs=30)
    eventually(lambda: driver.reap_after(1, count=4).requeued)
    sizes = []
    eventually(lambda: sizes.append(len(_sweep(driver, 4))) or driver.depth().running == 0)
    assert max(sizes) <= 4
    assert driver.depth().queued == 30


def test_a_request_with_two_strikes_runs_alone(driver: QueueDriver) -> None:
    """A worker that is not empty waits; an empty one takes the suspect and nothing else."""
    _strike(driver, "suspect", times=2)
    driver.enqueue("other")
    assert driver.claim("w1", free_tokens=999).grants == ()
    grants = driver.claim("w1").grants
    assert [(grant.request_id, grant.strikes) for grant in grants] == [("suspect", 2)]
    assert driver.claim("w1", free_tokens=990).grants == ()
    assert [g.request_id for g in driver.claim("w2").grants] == ["other"]
    driver.finish(grants[0])


def test_a_worker_is_free_again_after_a_suspect(driver: QueueDriver) -> None:
    """The end of the suspect opens its worker to others."""
    _strike(driver, "suspect", times=2)
    grant = driver.grant("w1")
    driver.enqueue("other")
    driver.finish(grant)
    assert driver.grant("w1").request_id == "other"


def test_the_third_strike_alone_is_a_dead_letter(driver: QueueDriver) -> None:
    """A request that took down three workers, the last one alone, ends with that answer."""
    _strike(driver, "poison", times=2)
    driver.grant("w3")
    reply = driver.let_leases_lapse()
    assert reply.dead_lettered == (RequestRef("acme", "poison"),)
    assert driver.status("poison").state is RequestState.FAILED
    assert driver.end("poison").error_code is ErrorCode.DEAD_LETTERED
    check_empty(driver.client, driver.keys)


def test_innocents_of_a_poisoned_batch_are_never_dead_letters(driver: QueueDriver) -> None:
    """Only the culprit is buried, and within three crashes; its batch mates all finish."""
    names = [f"r{number}" for number in range(5)]
    for name in names:
        driver.enqueue(name)
    crashes = 0
    while driver.depth().queued:
        grants = driver.claim().grants
        if any(grant.request_id == "r3" for grant in grants):
            crashes += 1
            driver.let_leases_lapse()
        else:
            for grant in grants:
                driver.finish(grant)
    assert crashes == 3
    states = {name: driver.status(name).error_code for name in names}
    assert states == {**dict.fromkeys(names), "r3": "dead_lettered"}


def test_strikes_from_a_dead_engine_count_alike(driver: QueueDriver) -> None:
    """release with a strike ends in a dead letter, too."""
    driver.enqueue("poison")
    for _ in range(3):
        driver.die(driver.grant())
    assert driver.end("poison").error_code is ErrorCode.DEAD_LETTERED


def test_a_graceful_hand_over_of_a_suspect_is_no_strike(driver: QueueDriver) -> None:
    """Even a request with two strikes may be handed back any number of times."""
    _strike(driver, "suspect", times=2)
    for _ in range(5):
        driver.release(driver.grant())
    assert driver.status("suspect").strikes == 2


def test_a_request_past_its_deadline_ends(driver: QueueDriver) -> None:
    """It gets its terminal entry from the sweep, even if nobody claims."""
    driver.enqueue(ttl_ms=300)
    assert eventually(lambda: driver.reap().expired) == (RequestRef("acme", "r1"),)
    assert driver.end().error_code is ErrorCode.DEADLINE_EXCEEDED
    assert driver.reap().expired == ()
    check_empty(driver.client, driver.keys)


def test_a_cancelled_request_whose_holder_vanished_ends(driver: QueueDriver) -> None:
    """Nobody takes over what was cancelled."""
    driver.enqueue()
    driver.grant()
    driver.cancel()
    driver.let_leases_lapse()
    assert driver.status().state is RequestState.CANCELLED
    assert driver.end().error_code is ErrorCode.CANCELLED


def test_a_running_request_without_its_hash_is_reported_lost(
    driver: QueueDriver, client: Redis
) -> None:
    """The orphan entry is acknowledged, and readers of the log are told behind its last token."""
    driver.enqueue()
    driver.emit(driver.grant(), 0, 2)
    client.delete(driver.keys.request("acme", "r1"))
    driver.let_leases_lapse()
    assert driver.end().error_code is ErrorCode.LOST
    assert driver.log()[-1][0] == "2-1"


def test_a_taken_back_request_wakes_idle_workers(driver: QueueDriver, client: Redis) -> None:
    """Workers that wait for work see that there is some."""
    driver.enqueue()
    driver.grant("w1")
    cursor = driver.claim("w2").wake_cursor
    driver.let_leases_lapse()
    assert client.xread({driver.keys.wake: cursor})


def test_a_broken_lane_does_not_stop_the_sweep(driver: QueueDriver, client: Redis) -> None:
    """Other lanes are swept as if nothing were wrong."""
    driver.enqueue("stuck", tenant="broken", priority=0)
    driver.enqueue("good", tenant="acme", priority=1)
    driver.claim()
    client.set(driver.keys.lane(0, "broken"), "no stream")
    found = eventually(lambda: driver.reap_after(1).requeued)
    assert found == (RequestRef("acme", "good"),)
    client.delete(driver.keys.lane(0, "broken"))
    driver.janitor()


def _strike(driver: QueueDriver, request_id: str, times: int) -> None:
    driver.enqueue(request_id)
    for number in range(times):
        driver.grant(f"crashed{number}")
        driver.let_leases_lapse()


def _sweep(driver: QueueDriver, count: int) -> tuple[RequestRef, ...]:
    return driver.reap_after(1, count=count).requeued
