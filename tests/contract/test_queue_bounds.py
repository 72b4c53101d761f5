"""A call does a bounded piece of work, and nothing waits for what never ends."""

from __future__ import annotations

from redis import Redis

from headrace.types import FinishReason
from support.queue_driver import QueueDriver
from support.waiting import eventually

MOST_CLOSED = 64  # as in claim.lua


def test_a_claim_puts_a_bounded_number_of_expired_requests_away(driver: QueueDriver) -> None:
    """Also where good ones lie between them; what is left over wakes the worker at once."""
    for number in range(80):
        driver.enqueue(f"late{number}", ttl_ms=1)
        driver.enqueue(f"good{number}")
    first = driver.claim(free_seqs=256, free_tokens=100_000, total_tokens=100_000)
    assert driver.depth().queued == 160 - MOST_CLOSED - len(first.grants)
    assert first.wake_cursor == "0-0"
    second = driver.claim(free_seqs=256, free_tokens=90_000, total_tokens=100_000)
    assert len(first.grants) + len(second.grants) == 80


def test_a_sweep_key_without_an_end_stops_no_sweep(driver: QueueDriver, client: Redis) -> None:
    """Written or restored by hand, it is taken over by the next worker that wants to sweep."""
    driver.enqueue()
    driver.grant()
    client.set(driver.keys.sweep, "nobody")
    eventually(lambda: driver.reap_after(1).requeued)


def test_a_log_that_was_written_into_still_gets_its_end(driver: QueueDriver, client: Redis) -> None:
    """An entry behind all that the request will ever have must not leave its readers waiting."""
    driver.enqueue()
    grant = driver.grant()
    client.xadd(driver.keys.token_log("acme", "r1"), {"c": "x"}, id="99-0")
    driver.finish(grant)
    assert driver.end().finish_reason is FinishReason.STOP
