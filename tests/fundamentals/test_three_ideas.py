"""The three ideas of docs/architecture.md, each as a few calls that anyone can follow."""

from __future__ import annotations

import pytest

from headrace.functions import EmitOutcome, EnqueueOutcome
from support.queue_driver import QueueDriver

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)


# 1. The worker owns queue cursor, scheduler and KV blocks.


def test_a_worker_claims_what_its_free_blocks_can_take(driver: QueueDriver) -> None:
    """Of three requests of 40 tokens, a worker with room for 100 gets two."""
    for name in ("r1", "r2", "r3"):
        driver.enqueue(name, cost=40)
    grants = driver.claim("w1", free_tokens=100).grants
    assert [grant.request_id for grant in grants] == ["r1", "r2"]


def test_what_does_not_fit_stays_in_redis_for_another_worker(driver: QueueDriver) -> None:
    """The third request is still queued, and a second worker takes it at once."""
    for name in ("r1", "r2", "r3"):
        driver.enqueue(name, cost=40)
    driver.claim("w1", free_tokens=100)
    assert driver.status("r3").state == "queued"
    assert driver.grant("w2").request_id == "r3"


# 2. The output stream is the checkpoint.


def test_the_id_of_an_entry_is_its_token_offset(driver: QueueDriver) -> None:
    """Chunks of 3 and 2 tokens are the entries 3-0 and 5-0."""
    driver.enqueue()
    grant = driver.grant()
    driver.emit(grant, offset=0, num_tokens=3)
    driver.emit(grant, offset=3, num_tokens=2)
    assert [entry_id for entry_id, _, _ in driver.log()] == ["3-0", "5-0"]


def test_a_successor_starts_where_the_log_ends(driver: QueueDriver) -> None:
    """After the first worker vanished, the grant of the second says how many tokens are out."""
    driver.enqueue()
    driver.emit(driver.grant("w1"), num_tokens=3)
    driver.let_leases_lapse()
    successor = driver.grant("w2")
    assert successor.num_tokens == 3
    driver.emit(successor, offset=3, num_tokens=1, worker_id="w2")
    assert driver.tokens() == [0, 1, 2, 3]


# 3. Every write is fenced and idempotent.


def test_each_grant_raises_the_epoch(driver: QueueDriver) -> None:
    """The second holder of a request has a higher epoch than the first."""
    driver.enqueue()
    first = driver.grant("w1")
    driver.let_leases_lapse()
    second = driver.grant("w2")
    assert second.epoch > first.epoch


def test_a_worker_that_wakes_up_late_changes_nothing(driver: QueueDriver) -> None:
    """A write with the old epoch is refused, and the log stays as it was."""
    driver.enqueue()
    first = driver.grant("w1")
    driver.let_leases_lapse()
    driver.grant("w2")
    assert driver.emit(first, num_tokens=5, worker_id="w1").outcome is EmitOutcome.FENCED
    assert driver.tokens() == []


def test_a_write_that_is_sent_twice_is_applied_once(driver: QueueDriver) -> None:
    """A replay of an applied emit is answered OK and adds nothing."""
    driver.enqueue()
    grant = driver.grant()
    outcomes = [driver.emit(grant, num_tokens=3).outcome for _ in range(2)]
    assert outcomes == [EmitOutcome.OK, EmitOutcome.OK]
    assert driver.tokens() == [0, 1, 2]


def test_a_write_that_would_leave_a_gap_is_refused(driver: QueueDriver) -> None:
    """The reply to a chunk at offset 7 names offset 3, which is where the log ends."""
    driver.enqueue()
    grant = driver.grant()
    driver.emit(grant, num_tokens=3)
    reply = driver.emit(grant, offset=7)
    assert (reply.outcome, reply.offset) == (EmitOutcome.GAP, 3)


def test_an_enqueue_that_is_sent_twice_makes_one_request(driver: QueueDriver) -> None:
    """The same id with the same payload is a duplicate, and is granted once."""
    outcomes = [driver.enqueue().outcome for _ in range(2)]
    assert outcomes == [EnqueueOutcome.OK, EnqueueOutcome.DUPLICATE]
    assert len(driver.claim().grants) == 1
