"""A deadline that passes, or finish_now: what a request has made by then is its answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.errors import ErrorCode, TransportError
from headrace.functions import (
    LIBRARY,
    EmitOutcome,
    FinishOutcome,
    Held,
    ReapReply,
    RequestRef,
    Wish,
    WishedEnd,
    reap,
    wishes,
)
from headrace.types import FinishReason, RequestState
from support.queue_driver import LEASE_MS, QueueDriver
from support.queue_invariants import check_empty


def _let_deadline_pass(driver: QueueDriver) -> None:
    driver.let_deadline_pass()
    assert driver.reap().expired == (RequestRef("acme", "r1"),)


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_deadline_ends_what_runs_with_the_tokens_that_the_log_holds(
    driver: QueueDriver, num_tokens: int
) -> None:
    """Its holder is gone, so the sweep ends it: an answer, not an error."""
    driver.enqueue(ttl_ms=60_000)
    grant = driver.grant()
    if num_tokens:
        driver.emit(grant, 0, num_tokens)
    _let_deadline_pass(driver)
    end = driver.end()
    assert (end.finish_reason, end.error_code, end.text) == (FinishReason.DEADLINE, None, "")
    assert driver.log()[-1][0] == f"{num_tokens}-1"
    status = driver.status()
    assert (status.state, status.finish_reason) == (RequestState.FINISHED, FinishReason.DEADLINE)
    check_empty(driver.client, driver.keys)


def test_a_sweep_leaves_a_holder_the_time_to_end_it_itself(driver: QueueDriver) -> None:
    """Only the holder has the text that was held back and the tokens that are not sent yet."""
    driver.enqueue(ttl_ms=60_000)
    grant = driver.grant()
    assert _sweep_at_the_deadline(driver).expired == ()
    assert driver.emit(grant, 0, 2).offset == 2
    assert driver.finish(grant, 2).outcome is FinishOutcome.OK
    check_empty(driver.client, driver.keys)


def test_what_was_handed_back_with_tokens_has_an_answer_at_its_deadline(
    driver: QueueDriver,
) -> None:
    """It waits for another worker, and what readers have seen is not called an error."""
    driver.enqueue(ttl_ms=60_000)
    grant = driver.grant()
    driver.emit(grant, 0, 3)
    driver.release(grant)
    _let_deadline_pass(driver)
    assert driver.end().finish_reason is FinishReason.DEADLINE
    assert driver.tokens() == [0, 1, 2]


def test_what_expires_in_the_queue_is_an_error(driver: QueueDriver) -> None:
    """It has never run, or has nothing to show for it."""
    driver.enqueue(ttl_ms=60_000)
    driver.release(driver.grant())
    _let_deadline_pass(driver)
    assert driver.end().error_code is ErrorCode.DEADLINE_EXCEEDED
    assert driver.status().state is RequestState.FAILED


def test_a_queued_request_that_is_finished_now_ends_empty(driver: QueueDriver) -> None:
    """Nobody has run it: its answer has no token, and it is never granted."""
    driver.enqueue()
    assert driver.finish_now() is RequestState.FINISHED
    assert driver.end().finish_reason is FinishReason.STOPPED_EARLY
    assert driver.claim().grants == ()
    assert driver.finish_now() is RequestState.FINISHED
    check_empty(driver.client, driver.keys)


def test_what_was_handed_back_is_finished_with_its_tokens(driver: QueueDriver) -> None:
    """Between two holders there is something to answer with."""
    driver.enqueue()
    grant = driver.grant()
    driver.emit(grant, 0, 2)
    driver.release(grant)
    assert driver.finish_now() is RequestState.FINISHED
    assert [entry_id for entry_id, _, _ in driver.log()] == ["2-0", "2-1"]


def test_a_running_request_is_finished_by_its_holder(driver: QueueDriver) -> None:
    """Its next emit says so, and is still taken."""
    driver.enqueue()
    grant = driver.grant()
    assert driver.finish_now() is driver.finish_now() is RequestState.RUNNING
    reply = driver.emit(grant, 0, 2)
    assert (reply.outcome, reply.offset) == (EmitOutcome.FINISH, 2)
    assert driver.finish(grant, 2).outcome is FinishOutcome.OK
    assert driver.finish_now() is RequestState.FINISHED
    check_empty(driver.client, driver.keys)


@pytest.mark.parametrize("how", ["release", "strike", "vanish"])
def test_nobody_takes_over_what_is_to_be_finished(driver: QueueDriver, how: str) -> None:
    """Its holder has left it, and the log holds an answer already."""
    driver.enqueue()
    grant = driver.grant()
    driver.emit(grant, 0, 1)
    driver.finish_now()
    if how == "vanish":
        driver.let_leases_lapse()
    else:
        driver.release(grant, strike=how == "strike")
    assert driver.end().finish_reason is FinishReason.STOPPED_EARLY
    check_empty(driver.client, driver.keys)


def test_a_cancel_weighs_more_than_a_finish(driver: QueueDriver) -> None:
    """Whoever cancels does not want the answer, whichever call came first."""
    driver.enqueue()
    grant = driver.grant()
    driver.finish_now()
    driver.cancel()
    (wish,) = driver.run(wishes(driver.keys, worker_id="w1", held=[grant.held]))
    assert wish.end is WishedEnd.CANCEL
    assert driver.emit(grant, 0, 1).outcome is EmitOutcome.CANCEL
    driver.release(grant)
    assert driver.end().error_code is ErrorCode.CANCELLED


def test_a_suspect_that_is_to_be_finished_is_no_dead_letter(driver: QueueDriver) -> None:
    """It ends with what it has, also when it takes its worker down for the last time."""
    driver.enqueue()
    for _ in range(2):
        driver.die(driver.grant())
    grant = driver.grant()
    driver.finish_now()
    driver.die(grant)
    assert driver.end().finish_reason is FinishReason.STOPPED_EARLY
    assert driver.client.exists(driver.keys.dead) == 0


def test_an_unknown_request_cannot_be_finished(driver: QueueDriver) -> None:
    """The answer is that nobody knows it."""
    assert driver.finish_now("nobody") is None


def test_wishes_are_told_to_the_holder_alone(driver: QueueDriver) -> None:
    """What clients want, request by request; what is held by others, or by nobody, is left out."""
    for request_id in ("a", "b", "c", "d"):
        driver.enqueue(request_id, priority=3)
    grants = driver.claim(free_seqs=3).grants
    driver.cancel("a")
    driver.finish_now("b")
    held = [grant.held for grant in grants]
    told = driver.run(wishes(driver.keys, worker_id="w1", held=held))
    ends = (WishedEnd.CANCEL, WishedEnd.FINISH, None)
    assert told == tuple(Wish(one, end, 3) for one, end in zip(held, ends, strict=True))
    assert driver.run(wishes(driver.keys, worker_id="w2", held=held)) == ()
    driver.release(*grants)


def test_what_is_not_held_has_no_wishes(driver: QueueDriver) -> None:
    """Damaged, of another epoch, unknown, or with a name that is none: the others are told."""
    for request_id in ("damaged", "old", "good"):
        driver.enqueue(request_id)
    damaged, old, good = (grant.held for grant in driver.claim().grants)
    key = driver.keys.request("acme", "damaged")
    driver.client.hset(key, "lane", "11")
    strange = [Held("acme", "unknown", 1), Held("ac:me", "x", 1), Held("acme", "a b", 1)]
    held = [damaged, replace(old, epoch=2), *strange, good]
    told = driver.run(wishes(driver.keys, worker_id="w1", held=held))
    assert told == (Wish(good, None, 5),)
    driver.client.hset(key, "lane", "5")


def test_wishes_of_no_epoch_are_refused(driver: QueueDriver) -> None:
    """An epoch is a number from 1; a call that names another is a fault of the caller."""
    held = [Held("acme", "r1", 0)]
    with pytest.raises(TransportError, match="epoch must be a whole number from 1"):
        driver.run(wishes(driver.keys, worker_id="w1", held=held))


NOW_IS_THE_DEADLINE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], 'deadline_ms', now)
redis.call('ZADD', KEYS[2], now, ARGV[1])
"""


def _sweep_at_the_deadline(driver: QueueDriver) -> ReapReply:
    """Sweep in one transaction with the end of the time, so that nothing can come between."""
    keys, call = driver.keys, reap(driver.keys, worker_id="w9", lease_ms=LEASE_MS, count=100)
    with driver.client.pipeline() as pipe:
        request = keys.request("acme", "r1")
        pipe.eval(NOW_IS_THE_DEADLINE, 2, request, keys.deadlines, "acme:r1")
        pipe.fcall(f"{LIBRARY}_{call.function}", 1, call.key, *call.args)
        _, reply = pipe.execute()
    return call.parse(reply)
