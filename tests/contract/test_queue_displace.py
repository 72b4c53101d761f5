"""claim for a full worker: only what running work of later priority gives way to is granted."""

from __future__ import annotations

from typing import Any

from headrace.functions import Grant
from support.queue_driver import TOTAL_TOKENS, QueueDriver

AGEING_MS = 10_000


def claim_full(driver: QueueDriver, *if_displaced: tuple[int, int, int], **room: Any) -> list[str]:
    """Claim for a worker without free room; returns the names of what it gets."""
    options = {"free_seqs": 0, "free_tokens": 0, **room}
    return names(driver.claim("full", if_displaced=if_displaced, **options).grants)


def names(grants: tuple[Grant, ...]) -> list[str]:
    """Return the request ids."""
    return [grant.request_id for grant in grants]


def test_a_full_worker_gets_what_its_work_gives_way_to(driver: QueueDriver) -> None:
    """It runs priority 5: one of priority 2 is granted, and one of priority 5 waits."""
    driver.enqueue("equal", priority=5)
    driver.enqueue("sooner", priority=2)
    assert claim_full(driver, (5, 8, TOTAL_TOKENS)) == ["sooner"]
    assert driver.grant("another").request_id == "equal"


def test_without_work_that_gives_way_a_full_worker_gets_nothing(driver: QueueDriver) -> None:
    """Nothing free and nothing to displace is no error."""
    driver.enqueue("sooner", priority=0)
    assert claim_full(driver) == []
    assert driver.depth().queued == 1


def test_room_that_others_give_way_to_is_given_away_once(driver: QueueDriver) -> None:
    """Grants of one claim share it, by sequences and by tokens."""
    for number in range(4):
        driver.enqueue(f"r{number}", priority=0, cost=40)
    assert claim_full(driver, (9, 2, TOTAL_TOKENS)) == ["r0", "r1"]
    assert claim_full(driver, (9, 8, 60)) == ["r2"]
    assert claim_full(driver, (9, 8, 39)) == []
    assert claim_full(driver, (9, 8, 40)) == ["r3"]


def test_only_later_priorities_give_way(driver: QueueDriver) -> None:
    """Of the room of priority 9 alone, one of 4 takes that; one of 2 takes what 3 would leave."""
    rooms = ((3, 5, 500), (9, 1, 100))
    driver.enqueue("middle", priority=4, cost=200)
    assert claim_full(driver, *rooms) == []
    driver.enqueue("soon", priority=2, cost=200)
    assert claim_full(driver, *rooms) == ["soon"]


def test_free_room_is_taken_before_others_give_way(driver: QueueDriver) -> None:
    """What fits goes on being granted at any priority; what displaces comes on top."""
    driver.enqueue("soon", priority=0)
    driver.enqueue("late", priority=9)
    assert claim_full(driver, (9, 8, 900), free_seqs=1, free_tokens=100) == ["soon"]
    assert claim_full(driver, (9, 8, 900), free_seqs=1, free_tokens=100) == ["late"]


def test_an_aged_lane_that_does_not_fit_keeps_nobody_out(driver: QueueDriver) -> None:
    """Bulk work that goes next by its age waits for free room, and the urgent one is granted."""
    driver.enqueue("bulk", priority=9, cost=50)
    driver.enqueue("urgent", priority=0, cost=50)
    let_age(driver, 9)
    assert claim_full(driver, (9, 4, 400)) == ["urgent"]
    assert claim_full(driver, (9, 4, 400), free_seqs=1, free_tokens=50) == ["bulk"]


def test_free_room_that_is_too_small_is_kept_for_an_aged_lane(driver: QueueDriver) -> None:
    """An urgent request displaces others, but takes nothing that gathers for the aged one."""
    driver.enqueue("bulk", priority=9, cost=500)
    driver.enqueue("urgent", priority=0, cost=50)
    let_age(driver, 9)
    assert claim_full(driver, free_seqs=4, free_tokens=400) == []
    assert claim_full(driver, (5, 4, 40), free_seqs=4, free_tokens=400) == []
    assert claim_full(driver, (5, 4, 50), free_seqs=4, free_tokens=400) == ["urgent"]


def test_a_lane_displaces_no_more_than_its_share(driver: QueueDriver) -> None:
    """Priority 4 gets twice the tokens of 5; then it is 5's turn, which displaces nobody."""
    for number in range(12):
        driver.enqueue(f"a{number}", priority=4)
        driver.enqueue(f"b{number}", priority=5)
    granted = claim_full(driver, (5, 10, TOTAL_TOKENS))
    assert granted == [f"a{number}" for number in range(len(granted))]
    assert 1 <= len(granted) <= 3


def test_a_suspect_displaces_nobody(driver: QueueDriver) -> None:
    """It runs alone, so it waits for an empty worker, whatever its priority."""
    driver.enqueue("suspect", priority=0)
    for _ in range(2):
        driver.die(driver.grant())
    assert claim_full(driver, (9, 8, TOTAL_TOKENS)) == []
    assert driver.grant("full").request_id == "suspect"


def let_age(driver: QueueDriver, lane: int) -> None:
    """Make a lane look as if it had been passed over for long."""
    since = driver.client.hget(driver.keys.stats, f"since:{lane}")
    assert since is not None
    driver.client.hset(driver.keys.stats, f"since:{lane}", int(since) - AGEING_MS)
