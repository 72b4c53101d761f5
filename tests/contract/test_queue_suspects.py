"""Suspects: one worker runs empty for them, and the rest of the queue goes on."""

from __future__ import annotations

from redis import Redis

from support.queue_driver import TOTAL_TOKENS, QueueDriver
from support.waiting import eventually

BUSY = {"free_tokens": TOTAL_TOKENS - 100}


def test_busy_workers_pass_a_suspect_over_but_for_one(driver: QueueDriver) -> None:
    """The first that meets it claims nothing more; the next goes on with what is behind it."""
    _make_suspects(driver, "suspect")
    driver.enqueue("next")
    assert driver.claim("w1", **BUSY).grants == ()
    assert [grant.request_id for grant in driver.claim("w2", **BUSY).grants] == ["next"]


def test_the_worker_that_ran_empty_gets_the_suspect(driver: QueueDriver) -> None:
    """Even if others have claimed meanwhile; and it gets nothing else with it."""
    _make_suspects(driver, "suspect")
    driver.claim("w1", **BUSY)
    driver.enqueue("next")
    assert driver.claim("w2", **BUSY).grants[0].request_id == "next"
    driver.enqueue("last")
    assert [grant.request_id for grant in driver.claim("w1").grants] == ["suspect"]
    assert driver.claim("w1", **BUSY).grants == ()
    assert [grant.request_id for grant in driver.claim("w3", **BUSY).grants] == ["last"]


def test_an_empty_worker_prefers_other_work_while_somebody_isolates(driver: QueueDriver) -> None:
    """Only when there is nothing else does it take a suspect, too."""
    _make_suspects(driver, "suspect")
    driver.claim("w1", **BUSY)
    driver.enqueue("next")
    (grant,) = driver.claim("w2").grants
    assert grant.request_id == "next"
    driver.finish(grant, worker_id="w2")
    assert [grant.request_id for grant in driver.claim("w2").grants] == ["suspect"]


def test_suspects_go_one_by_one_through_the_same_worker(driver: QueueDriver) -> None:
    """A single worker answers them all, and then the rest."""
    _make_suspects(driver, "s1", "s2")
    driver.enqueue("next")
    served = []
    for _ in range(3):
        (grant,) = driver.claim("w1").grants
        served.append(grant.request_id)
        driver.finish(grant)
    assert served == ["s1", "s2", "next"]


def test_the_turn_of_isolation_ends_with_its_worker(driver: QueueDriver, client: Redis) -> None:
    """A worker that met a suspect and vanished does not keep the next one from it."""
    _make_suspects(driver, "suspect")
    driver.claim("w1", **BUSY)
    assert client.get(driver.keys.isolator) == b"w1"
    assert 0 < client.pttl(driver.keys.isolator) <= 60_000
    client.delete(driver.keys.isolator)  # as its TTL would
    driver.enqueue("next")
    assert driver.claim("w2", **BUSY).grants == ()
    assert client.get(driver.keys.isolator) == b"w2"


def test_a_worker_with_a_suspect_keeps_the_turn(driver: QueueDriver, client: Redis) -> None:
    """As long as it asks, nobody else runs empty for the next suspect."""
    _make_suspects(driver, "s1", "s2")
    driver.claim("w1")
    client.pexpire(driver.keys.isolator, 10_000)
    driver.claim("w1", **BUSY)
    assert client.pttl(driver.keys.isolator) > 10_000
    driver.enqueue("next")
    assert [grant.request_id for grant in driver.claim("w2", **BUSY).grants] == ["next"]


def test_a_suspect_whose_waiting_place_was_lost_is_still_isolated(
    driver: QueueDriver, client: Redis
) -> None:
    """A group that is made anew delivers it like a new one; the claim knows it by its strikes."""
    _make_suspects(driver, "suspect")
    client.xgroup_destroy(driver.keys.lane(5, "acme"), "workers")
    driver.enqueue("next")
    assert driver.claim("w1", **BUSY).grants == ()
    assert [grant.request_id for grant in driver.claim("w2", **BUSY).grants] == ["next"]
    assert [grant.request_id for grant in driver.claim("w1").grants] == ["suspect"]


def test_a_suspect_that_changes_its_lane_is_still_isolated(driver: QueueDriver) -> None:
    """Served sooner, it is met sooner, by a worker of its own all the same."""
    _make_suspects(driver, "suspect")
    driver.enqueue("next")
    driver.reprioritise(0, "suspect")
    assert driver.claim("w1", **BUSY).grants == ()
    assert [grant.request_id for grant in driver.claim("w2", **BUSY).grants] == ["next"]
    assert [grant.request_id for grant in driver.claim("w1").grants] == ["suspect"]


def test_a_cancelled_suspect_leaves_its_place(driver: QueueDriver) -> None:
    """It ends at once, and nothing waits behind it."""
    _make_suspects(driver, "suspect")
    driver.cancel("suspect")
    driver.enqueue("next")
    assert [grant.request_id for grant in driver.claim("w1", **BUSY).grants] == ["next"]


def test_waiting_suspects_have_no_lease(driver: QueueDriver) -> None:
    """They may wait for longer than any lease, and get no strike for it."""
    _make_suspects(driver, "suspect")
    for _ in range(3):
        eventually(lambda: driver.reap_after(1) is not None)
    assert driver.janitor() == 0
    assert driver.status("suspect").strikes == 2


def _make_suspects(driver: QueueDriver, *names: str) -> None:
    """Enqueue requests of which two workers died."""
    for name in names:
        driver.enqueue(name)
    for _ in range(2):
        driver.die(*driver.claim("gone").grants, worker_id="gone")
