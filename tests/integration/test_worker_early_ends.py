"""Requests that a worker ends before their time: by finish_now, or at their deadline."""

from __future__ import annotations

import signal

import pytest

from headrace.types import FinishReason, RequestState
from support.queue_driver import QueueDriver
from support.streams import Asked, check_stream, emit_tokens, enqueue, text_of, wait_for_ends
from support.tokenizers import byte_level_tokenizer
from support.waiting import eventually
from support.worker_fixtures import ON_VALKEY
from support.workers import WorkerFarm

LONG = Asked("r1", max_tokens=4000)
BEGUN = 4  # tokens whose text is whole


def check_early_end(driver: QueueDriver, reason: FinishReason) -> None:
    """The long request has an answer: its first tokens, all of their text, true counts."""
    end, tokens = driver.end("r1"), driver.tokens("r1")
    assert (end.finish_reason, end.error_code) == (reason, None)
    assert 0 < len(tokens) < LONG.max_tokens
    assert tokens == LONG.answer[: len(tokens)]
    assert text_of(driver, "r1") == byte_level_tokenizer().decode(tokens)
    assert end.usage is not None
    assert end.usage.completion_tokens == len(tokens)


@ON_VALKEY
@pytest.mark.parametrize("is_hint_lost", [False, True])
def test_a_running_request_is_finished_with_what_there_is(
    driver: QueueDriver, farm: WorkerFarm, is_hint_lost: bool
) -> None:
    """Within about a second even without a hint, and although nobody streams it."""
    next_one = Asked("r2")
    enqueue(driver, LONG, attached=False)
    farm.start("--max-num-seqs", "1", engine=("--step-s", "0.005"))
    eventually(lambda: driver.status("r1").num_tokens > 0)
    if is_hint_lost:
        driver.client.hset(driver.keys.request("acme", "r1"), "finish", 1)
    else:
        assert driver.finish_now("r1") is RequestState.RUNNING
    eventually(lambda: driver.status("r1").state is RequestState.FINISHED)
    check_early_end(driver, FinishReason.STOPPED_EARLY)
    enqueue(driver, next_one)
    wait_for_ends(driver, next_one)
    check_stream(driver, next_one)


@ON_VALKEY
def test_a_deadline_that_passes_while_running_ends_the_request(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """Its answer is what it has said by then, held-back text included, and it is no error."""
    worker = farm.ready(engine=("--step-s", "0.01"))
    worker.send(signal.SIGSTOP)
    enqueue(driver, LONG, ttl_ms=3_600_000)
    grant = driver.grant("another")  # which begins the answer, however slow the machine is
    emit_tokens(driver, grant, LONG.answer[:BEGUN], worker_id="another")
    driver.move_deadline(in_ms=2000)
    driver.release(grant, worker_id="another")
    worker.send(signal.SIGCONT)
    wait_for_ends(driver, LONG)
    check_early_end(driver, FinishReason.DEADLINE)
