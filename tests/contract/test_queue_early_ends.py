"""A deadline that passes: what a request has made by then is its answer."""

from __future__ import annotations

import pytest

from headrace.errors import ErrorCode
from headrace.functions import FinishOutcome, RequestRef
from headrace.types import FinishReason, RequestState
from support.queue_driver import QueueDriver
from support.queue_invariants import check_empty
from support.waiting import eventually


def _let_deadline_pass(driver: QueueDriver) -> None:
    assert eventually(lambda: driver.reap().expired) == (RequestRef("acme", "r1"),)


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_deadline_ends_what_runs_with_the_tokens_that_the_log_holds(
    driver: QueueDriver, num_tokens: int
) -> None:
    """Its holder is gone, so the sweep ends it: an answer, not an error."""
    driver.enqueue(ttl_ms=100)
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
    driver.enqueue(ttl_ms=100)
    grant = driver.grant()
    deadline_s = driver.status().deadline_at_s
    assert deadline_s is not None
    eventually(lambda: _redis_time_s(driver) > deadline_s)
    assert driver.reap().expired == ()
    assert driver.emit(grant, 0, 2).offset == 2
    assert driver.finish(grant, 2).outcome is FinishOutcome.OK
    check_empty(driver.client, driver.keys)


def test_what_was_handed_back_with_tokens_has_an_answer_at_its_deadline(
    driver: QueueDriver,
) -> None:
    """It waits for another worker, and what readers have seen is not called an error."""
    driver.enqueue(ttl_ms=100)
    grant = driver.grant()
    driver.emit(grant, 0, 3)
    driver.release(grant)
    _let_deadline_pass(driver)
    assert driver.end().finish_reason is FinishReason.DEADLINE
    assert driver.tokens() == [0, 1, 2]


def test_what_expires_in_the_queue_is_an_error(driver: QueueDriver) -> None:
    """It has never run, or has nothing to show for it."""
    driver.enqueue(ttl_ms=100)
    driver.release(driver.grant())
    _let_deadline_pass(driver)
    assert driver.end().error_code is ErrorCode.DEADLINE_EXCEEDED
    assert driver.status().state is RequestState.FAILED


def _redis_time_s(driver: QueueDriver) -> float:
    seconds, microseconds = driver.client.time()
    return float(seconds + microseconds / 1e6)
