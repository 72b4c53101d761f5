"""What a backend does with the client, as the shortest code that does it.

Read from top to bottom, this is the client's manual. A FakeWorker stands in for the GPU; all the
rest is real.
"""

from __future__ import annotations

import pytest

from headrace import (
    AsyncClient,
    Client,
    Completion,
    InvalidRequest,
    RequestConflict,
    RequestState,
    RequestTimeout,
    Timeout,
)
from headrace.testing import FakeWorker

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)

ANSWERS = {"Why is the sky blue?": "Rayleigh scattering.", "Hi": "Hello!"}


async def test_ask_and_wait(redis_url: str) -> None:
    """One call queues a prompt and returns the answer."""
    async with AsyncClient(redis_url) as client, FakeWorker(redis_url, answers=ANSWERS):
        answer = await client.generate("Why is the sky blue?", max_tokens=64)
    assert answer.text == "Rayleigh scattering."
    assert answer.finish_reason == "stop"
    assert answer.usage.completion_tokens == 20


async def test_watch_the_answer_grow(redis_url: str) -> None:
    """A stream gives chunks as they come, and the whole answer afterwards."""
    async with AsyncClient(redis_url) as client, FakeWorker(redis_url, answers=ANSWERS):
        shown = ""
        messages = [{"role": "user", "content": "Hi"}]
        async with client.stream(messages=messages, temperature=0.7, seed=1) as stream:
            async for chunk in stream:
                shown += chunk.text
    assert shown == stream.completion.text == "Hello!"


def test_do_the_same_from_a_thread(redis_url: str) -> None:
    """Client is AsyncClient without await."""
    with Client(redis_url) as client, FakeWorker(redis_url, answers=ANSWERS):
        with client.stream("Hi") as stream:
            shown = "".join(chunk.text for chunk in stream)
        assert shown == client.generate("Hi").text == "Hello!"


async def test_leave_and_come_back(redis_url: str) -> None:
    """A request outlives its reader: later, somewhere else, its id gives the rest."""
    async with AsyncClient(redis_url) as here:
        request_id = await here.submit("Hi", request_id="order-42")
    with FakeWorker(redis_url, answers=ANSWERS):
        async with AsyncClient(redis_url) as elsewhere:
            async with elsewhere.attach(request_id, after=4) as stream:
                rest = await stream.read()
    assert rest.text == "o!"


async def test_ask_twice_without_paying_twice(redis_url: str) -> None:
    """The same id and payload is the same request; another payload under the id is refused."""
    async with AsyncClient(redis_url) as client:
        with FakeWorker(redis_url, answers=ANSWERS) as worker:
            await client.generate("Hi", request_id="order-42")
            await client.generate("Hi", request_id="order-42")
        assert len(worker.requests) == 1
        with pytest.raises(RequestConflict):
            await client.submit("Bye", request_id="order-42")


async def test_ask_a_thousand_times(redis_url: str) -> None:
    """Bulk work goes through a window, and comes back in the order of completion."""
    prompts = (f"question {i}" for i in range(1000))
    lengths = {}
    async with AsyncClient(redis_url) as client, FakeWorker(redis_url, split="words"):
        async for answer in client.generate_many(prompts, request_id="run", max_in_flight=200):
            lengths[answer.request_id] = len(answer.token_ids)
    assert lengths == {f"run:{i}": 2 for i in range(1000)}


async def test_keep_going_past_failures(redis_url: str) -> None:
    """With return_errors, a bad prompt is one outcome among others."""
    async with AsyncClient(redis_url) as client, FakeWorker(redis_url, answers=ANSWERS):
        outcomes = [o async for o in client.generate_many(["Hi", ""], return_errors=True)]
    assert sorted(type(outcome).__name__ for outcome in outcomes) == [
        "Completion",
        "InvalidRequest",
    ]


async def test_ask_for_several_answers(redis_url: str) -> None:
    """n answers to one prompt come as choices of one completion."""
    async with AsyncClient(redis_url) as client, FakeWorker(redis_url, answers=ANSWERS):
        answer = await client.generate("Hi", n=3)
    assert [choice.text for choice in answer.choices] == ["Hello!"] * 3


async def test_never_wait_for_ever(redis_url: str) -> None:
    """Every wait is finite: without a worker the call ends, and its request with it."""
    async with AsyncClient(redis_url, timeout=Timeout(first_chunk=0.1)) as client:
        with pytest.raises(RequestTimeout, match=r"waited 0\.1 s for the first chunk"):
            await client.generate("Hi", request_id="order-42")
        assert (await client.status("order-42")).state is RequestState.CANCELLED


async def test_learn_of_mistakes_at_once(redis_url: str) -> None:
    """Wrong arguments are refused by name, before anything is sent."""
    async with AsyncClient(redis_url) as client:
        with pytest.raises(InvalidRequest, match=r"top_p must be in \[0, 1\], not 1\.5"):
            await client.generate("Hi", top_p=1.5)


async def test_stop_what_nobody_reads(redis_url: str) -> None:
    """Leaving a stream cancels its request, so that no GPU works for a closed tab."""
    async with AsyncClient(redis_url) as client:
        async with client.stream("Hi", request_id="order-42"):
            pass
        assert (await client.status("order-42")).state is RequestState.CANCELLED


def test_test_your_own_backend(redis_url: str) -> None:
    """FakeWorker computes answers, slowly or wrongly if that is what a test needs."""

    def shout(request: object) -> str:
        return "HI!"

    with Client(redis_url) as client, FakeWorker(redis_url, answers=shout, token_delay_s=0.001):
        answer = client.generate("Hi")
    assert isinstance(answer, Completion)
    assert answer.text == "HI!"
