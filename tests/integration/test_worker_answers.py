"""A worker process over real servers: whatever is enqueued gets exactly one answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.errors import ErrorCode
from headrace.types import FinishReason, RequestState
from support.fake_engine import Misfortune, fake_answer
from support.queue_driver import QueueDriver
from support.streams import (
    Asked,
    check_stream,
    chunks_of,
    enqueue,
    is_drained,
    skewed,
    text_of,
    wait_for_ends,
)
from support.tokenizers import byte_level_tokenizer
from support.waiting import eventually
from support.worker_fixtures import ON_VALKEY
from support.workers import WorkerFarm


def test_skewed_requests_all_complete_and_equal_the_oracle(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """Sixty requests of very different lengths are answered exactly, and nothing stays behind."""
    asked = skewed(60)
    enqueue(driver, *asked)
    farm.start()
    wait_for_ends(driver, *asked)
    for request in asked:
        check_stream(driver, request)
    assert eventually(lambda: is_drained(driver))


@ON_VALKEY
def test_a_pool_that_is_too_small_for_all_answers_all(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """Requests that cost more than they said: some are computed again, all are answered."""
    asked = [Asked(f"r{n}", max_tokens=100, seed=n) for n in range(12)]
    enqueue(driver, *asked, cost=5)
    worker = farm.start(engine=("--num-blocks", "12", "--step-s", "0.005"))  # they overlap
    worker.wait_for("sequence.preempted")
    wait_for_ends(driver, *asked)
    for request in asked:
        check_stream(driver, request)


@ON_VALKEY
def test_a_stop_string_ends_the_output_before_it(driver: QueueDriver, farm: WorkerFarm) -> None:
    """The text ends before the stop string, with reason stop, and no later token is published."""
    plain = Asked("plain", max_tokens=40, seed=3)
    text = byte_level_tokenizer().decode(plain.answer)
    stop = text[8:11]
    asked = Asked("r1", max_tokens=40, seed=3, sampling={"stop": [stop]})
    enqueue(driver, asked)
    farm.start()
    wait_for_ends(driver, asked)
    end = driver.end("r1")
    assert end.finish_reason is FinishReason.STOP
    assert text_of(driver, "r1") == text[: text.index(stop)]
    tokens = driver.tokens("r1")
    assert tokens == plain.answer[: len(tokens)]


@ON_VALKEY
def test_a_stop_token_ends_the_output_with_it(driver: QueueDriver, farm: WorkerFarm) -> None:
    """A stop token is the last one, and the reason is stop."""
    stop = Asked("x", max_tokens=30).answer[12]
    asked = Asked("r1", max_tokens=30, sampling={"stop_token_ids": [stop]})
    enqueue(driver, asked)
    farm.start()
    wait_for_ends(driver, asked)
    expected = fake_answer(asked.prompt, max_tokens=30, seed=asked.seed, stop_token_ids=[stop])
    assert driver.tokens("r1") == expected
    assert driver.end("r1").finish_reason is FinishReason.STOP


@ON_VALKEY
def test_logprobs_travel_with_their_tokens(driver: QueueDriver, farm: WorkerFarm) -> None:
    """A request that asks for logprobs finds one for each token in its log."""
    asked = Asked("r1", max_tokens=12, sampling={"logprobs": 1})
    enqueue(driver, asked)
    farm.start()
    wait_for_ends(driver, asked)
    logprobs = [p for chunk in chunks_of(driver, "r1") for p in chunk.logprobs or ()]
    assert [p.token_id for p in logprobs] == asked.answer
    assert {p.logprob for p in logprobs} == {-0.5}


@ON_VALKEY
def test_bad_requests_get_one_typed_answer_and_neighbours_none_the_worse(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """Undecodable, unknown model, too long, failing: each ends with its code; the others finish."""
    good = [Asked(f"good{n}", seed=n) for n in range(4)]
    bad = {
        "undecodable": (b"\xc1", ErrorCode.UNDECODABLE),
        "stranger": (Asked("other").payload, ErrorCode.INVALID_REQUEST),
        "model": (Asked("model", model="gpt-9").payload, ErrorCode.UNKNOWN_MODEL),
        "long": (Asked("long", prompt=(5,) * 5000).payload, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        "vocabulary": (Asked("vocabulary", prompt=(70_000,)).payload, ErrorCode.INVALID_REQUEST),
        "fails": (
            Asked("fails", prompt=(5, Misfortune.FAIL_REQUEST, 3)).payload,
            ErrorCode.ENGINE_FAILURE,
        ),
    }
    enqueue(driver, *good[:2])
    for name, (payload, _) in bad.items():
        driver.enqueue(name, payload=payload)
    enqueue(driver, *good[2:])
    farm.start()
    wait_for_ends(driver, *good, *(Asked(name) for name in bad))
    for request in good:
        check_stream(driver, request)
    for name, (_, code) in bad.items():
        end = driver.end(name)
        assert (end.finish_reason, end.error_code) == (FinishReason.ERROR, code), name
        assert end.error_message, name
    assert eventually(lambda: is_drained(driver))


@ON_VALKEY
@pytest.mark.parametrize("attached", [True, False])
def test_a_running_request_is_cancelled_within_a_second(
    driver: QueueDriver, farm: WorkerFarm, attached: bool
) -> None:
    """Its log ends with reason cancelled, what it had stays, and its blocks go to others."""
    asked, next_one = Asked("r1", max_tokens=4000), Asked("r2")
    enqueue(driver, asked, attached=attached)
    farm.start("--max-num-seqs", "1", engine=("--step-s", "0.005"))
    eventually(lambda: driver.status("r1").num_tokens > 0)
    assert driver.cancel("r1") is RequestState.RUNNING
    # A second where there is one to spare; its whole answer would take twenty.
    eventually(lambda: driver.status("r1").state is RequestState.CANCELLED)
    assert driver.end("r1").error_code is ErrorCode.CANCELLED
    tokens = driver.tokens("r1")
    assert tokens
    assert tokens == asked.answer[: len(tokens)]
    enqueue(driver, next_one)
    wait_for_ends(driver, next_one)
    check_stream(driver, next_one)


@ON_VALKEY
def test_a_queued_request_is_cancelled_before_any_worker_sees_it(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """A request that is cancelled while it waits never runs."""
    enqueue(driver, cancelled := Asked("r1"), other := Asked("r2"))
    driver.cancel("r1")
    worker = farm.start()
    wait_for_ends(driver, other)
    assert driver.status(cancelled.request_id).state is RequestState.CANCELLED
    assert driver.tokens("r1") == []
    assert [event["request_id"] for event in worker.events("request.received")] == ["r2"]


@ON_VALKEY
def test_two_workers_share_a_queue(driver: QueueDriver, farm: WorkerFarm) -> None:
    """Both claim, neither takes what the other holds, all answers are exact."""
    asked: list[Asked] = []
    workers = [farm.ready("--max-num-seqs", "2", engine=("--step-s", "0.002")) for _ in range(2)]

    def top_up_and_look() -> bool:
        """Return whether both have claimed; however late the second comes, there is work for it."""
        if driver.depth().queued == 0:
            more = [replace(r, request_id=f"{len(asked)}-{r.request_id}") for r in skewed(40)]
            enqueue(driver, *more)
            asked.extend(more)
        return all(worker.events("request.received") for worker in workers)

    eventually(top_up_and_look)
    wait_for_ends(driver, *asked)
    for request in asked:
        check_stream(driver, request)
    taken = [{e["request_id"] for e in worker.events("request.received")} for worker in workers]
    assert not taken[0] & taken[1]
