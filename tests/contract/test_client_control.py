"""What both clients can do to a request that waits or runs, beside cancelling it."""

from __future__ import annotations

import pytest
from redis import Redis

from headrace import (
    FinishReason,
    InvalidRequest,
    RequestNotFound,
    RequestState,
)
from headrace.keys import Keys
from headrace.testing import FakeWorker
from support.any_client import AnyClient
from support.queue_driver import QueueDriver

SLOW_S = 0.005  # a token of the fake worker


async def test_finishing_now_brings_the_text_so_far(
    any_client: AnyClient, redis_url: str, queue: Keys
) -> None:
    """The reader gets a completion, not an error, and it holds what the chunks held."""
    with FakeWorker(redis_url, queue=queue.queue, token_delay_s=SLOW_S):
        async with any_client.stream("x" * 5000, request_id="r1", max_tokens=5000) as stream:
            chunks = aiter(stream)
            first = await anext(chunks)
            assert await any_client.finish_now("r1") in (
                RequestState.RUNNING,
                RequestState.FINISHED,
            )
            said = first.text + "".join([chunk.text async for chunk in chunks])
    answer = stream.completion
    assert answer.finish_reason is FinishReason.STOPPED_EARLY
    assert answer.text == said
    assert answer.usage.completion_tokens == len(answer.token_ids) == len(said) < 5000


async def test_finishing_a_queued_request_brings_an_empty_answer(any_client: AnyClient) -> None:
    """Nobody has run it, so there is nothing to say, and no error either."""
    await any_client.submit("Hi", request_id="r1")
    assert await any_client.finish_now("r1") is RequestState.FINISHED
    async with any_client.attach("r1") as stream:
        answer = await stream.read()
    assert (answer.text, answer.token_ids) == ("", ())
    assert answer.finish_reason is FinishReason.STOPPED_EARLY


async def test_finishing_acts_on_all_answers_of_a_group(
    any_client: AnyClient, driver: QueueDriver
) -> None:
    """Each of n answers ends where it is; one that had ended stays as it is."""
    await any_client.submit("abc", n=2, request_id="r1")
    driver.finish(driver.grant())
    assert await any_client.finish_now("r1") is RequestState.FINISHED
    reasons = [driver.status(f"r1/{i}").finish_reason for i in range(2)]
    assert reasons == [FinishReason.STOP, FinishReason.STOPPED_EARLY]


async def test_a_queued_request_can_be_had_sooner(
    any_client: AnyClient, driver: QueueDriver
) -> None:
    """It is granted before what was asked for earlier, and status tells its new priority."""
    await any_client.submit("a", request_id="a", priority=9)
    await any_client.submit("b", request_id="b", priority=9)
    assert await any_client.reprioritise("b", 0) is RequestState.QUEUED
    assert (await any_client.status("b")).priority == 0
    assert driver.grant().request_id == "b"


async def test_reprioritising_acts_on_all_answers_of_a_group(
    any_client: AnyClient, driver: QueueDriver
) -> None:
    """Those that wait, run or have ended: the last stay as they are."""
    await any_client.submit("abc", n=3, request_id="r1")
    driver.finish(driver.grant())
    driver.grant()
    assert await any_client.reprioritise("r1", 2) is RequestState.RUNNING
    assert [driver.status(f"r1/{i}").priority for i in range(3)] == [5, 2, 2]


@pytest.mark.parametrize("priority", [-1, 10, 1.5, True, "soon"])
async def test_a_priority_that_does_not_exist_is_refused_here(
    any_client: AnyClient, priority: object
) -> None:
    """The error names it, and nothing is sent."""
    with pytest.raises(InvalidRequest, match=f"priority .* not {priority!r}"):
        await any_client.reprioritise("never", priority)


@pytest.mark.parametrize(("call", "more"), [("finish_now", ()), ("reprioritise", (1,))])
async def test_an_unknown_request_is_not_found(
    any_client: AnyClient, call: str, more: tuple[int, ...]
) -> None:
    """A request that the queue never heard of cannot be controlled."""
    with pytest.raises(RequestNotFound, match="'never'"):
        await getattr(any_client, call)("never", *more)


async def test_a_deadline_brings_the_text_so_far(
    any_client: AnyClient, client: Redis, redis_url: str, queue: Keys
) -> None:
    """The best answer by then: a completion with the reason deadline."""
    driver = QueueDriver(client, queue)
    asked = any_client.stream("x" * 5000, request_id="r1", ttl=3600.0, max_tokens=5000)
    async with asked as stream:
        driver.emit(grant := driver.grant(), num_tokens=3)  # so it has begun, whatever comes
        driver.move_deadline(in_ms=200)
        driver.release(grant)
        with FakeWorker(redis_url, queue=queue.queue, token_delay_s=SLOW_S):
            answer = await stream.read()
    assert answer.finish_reason is FinishReason.DEADLINE
    assert 3 <= len(answer.text) < 5000
