"""Several answers to one prompt: n requests on the wire, one request for the caller."""

from __future__ import annotations

import pytest

from headrace import InvalidRequest, Overloaded, RequestCancelled, RequestState
from headrace.protocol import decode_request
from headrace.testing import FakeWorker
from support.any_client import AnyClient
from support.client_fixtures import Connect
from support.queue_driver import QueueDriver


async def test_completion_holds_all_answers(any_client: AnyClient, fake_worker: FakeWorker) -> None:
    """The first answer is the completion itself; choices holds all, tokens are counted together."""
    answer = await any_client.generate("abc", n=3, request_id="r1")
    assert [choice.text for choice in answer.choices] == ["abc"] * 3
    assert [choice.request_id for choice in answer.choices] == ["r1/0", "r1/1", "r1/2"]
    assert (answer.request_id, answer.text) == ("r1", "abc")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 9)


async def test_answers_are_drawn_from_neighbouring_seeds(
    any_client: AnyClient, driver: QueueDriver
) -> None:
    """Answer i travels as a request of its own with seed + i, and n stays at home."""
    await any_client.submit("abc", n=3, seed=2**64 - 1)
    payloads = [decode_request(grant.payload) for grant in driver.claim().grants]
    assert [p.sampling.seed for p in payloads] == [2**64 - 1, 0, 1]
    assert {p.sampling.n for p in payloads} == {1}


async def test_chunks_say_which_answer_they_belong_to(
    any_client: AnyClient, fake_worker: FakeWorker
) -> None:
    """The merged stream keeps the order within each answer."""
    async with any_client.stream("abc", n=2) as stream:
        chunks = await stream.chunks()
    for choice in (0, 1):
        own = [chunk for chunk in chunks if chunk.choice == choice]
        assert [chunk.index for chunk in own] == [0, 1, 2]
        assert "".join(chunk.text for chunk in own) == "abc"


async def test_group_is_attached_by_its_own_id(
    any_client: AnyClient, fake_worker: FakeWorker
) -> None:
    """The id that submit returns gives all answers back, each from its own offset if need be."""
    await any_client.generate("abcd", n=2, request_id="r1")
    async with any_client.attach("r1", after=1) as stream:
        assert [c.text for c in (await stream.read()).choices] == ["bcd", "bcd"]
    async with any_client.attach("r1", after=[3, 0]) as stream:
        assert [c.text for c in (await stream.read()).choices] == ["d", "abcd"]


async def test_offsets_must_be_one_or_one_for_each_answer(
    any_client: AnyClient, fake_worker: FakeWorker
) -> None:
    """A list of offsets of another length is refused."""
    await any_client.generate("abcd", n=2, request_id="r1")
    with pytest.raises(InvalidRequest, match="3 offsets for 2 answers"):
        async with any_client.attach("r1", after=[0, 0, 0]):
            pass


async def test_status_and_cancel_act_on_the_group(
    any_client: AnyClient, driver: QueueDriver
) -> None:
    """A group is as far as its slowest answer, and is cancelled as a whole."""
    await any_client.submit("abc", n=2, request_id="r1")
    grant = driver.grant()
    driver.emit(grant, num_tokens=2)
    status = await any_client.status("r1")
    assert (status.request_id, status.state) == ("r1", RequestState.RUNNING)
    assert status.num_tokens == 2
    driver.finish(grant, 2)
    assert (await any_client.status("r1")).state is RequestState.QUEUED
    assert await any_client.cancel("r1") is RequestState.CANCELLED
    assert driver.status("r1/0").state is RequestState.FINISHED
    assert driver.status("r1/1").state is RequestState.CANCELLED


async def test_first_error_ends_the_stream_and_the_other_answers(
    any_client: AnyClient, driver: QueueDriver
) -> None:
    """When one answer fails, the caller gets its error and the others are cancelled."""
    async with any_client.stream("abc", n=2, request_id="r1") as stream:
        driver.cancel("r1/1")
        with pytest.raises(RequestCancelled, match="r1/1"):
            await stream.read()
    assert driver.status("r1/0").state is RequestState.CANCELLED


async def test_group_that_does_not_fit_the_queue_leaves_nothing_behind(
    connect: Connect, driver: QueueDriver
) -> None:
    """When the queue's bound cuts a group, what was queued of it is withdrawn."""
    any_client = connect(max_queued=2)
    with pytest.raises(Overloaded):
        await any_client.submit("abc", n=3)
    assert driver.depth().queued == 0
