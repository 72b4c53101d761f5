"""FakeWorker: a worker like any other, but for the model."""

from __future__ import annotations

import pytest

from headrace import (
    AsyncClient,
    Client,
    EngineFailure,
    ErrorCode,
    InvalidRequest,
    RequestState,
)
from headrace.errors import error_for
from headrace.keys import Keys
from headrace.protocol import RequestMessage
from headrace.testing import FakeWorker
from support.client_fixtures import QUICK
from support.servers import running_server
from support.waiting import eventually


def _client(url: str, queue: Keys) -> Client:
    return Client(url, queue=queue.queue, timeout=QUICK)


def test_answers_are_looked_up_by_prompt(redis_url: str, queue: Keys) -> None:
    """Text, token ids and the last message's text find their answer; others are refused."""
    answers = {"Hi": "Hello"}
    with (
        FakeWorker(redis_url, queue=queue.queue, answers=answers),
        _client(redis_url, queue) as client,
    ):
        assert client.generate("Hi").text == "Hello"
        assert client.generate([72, 105]).text == "Hello"
        assert client.generate(messages=[{"role": "user", "content": "Hi"}]).text == "Hello"
        with pytest.raises(InvalidRequest, match="no answer to 'Bye'"):
            client.generate("Bye")


def test_answers_may_be_errors(redis_url: str, queue: Keys) -> None:
    """A function that raises a RequestError refuses that request, and no other."""

    def moody(request: RequestMessage) -> str:
        if request.prompt == "bad":
            raise error_for(ErrorCode.ENGINE_FAILURE, "no")
        return "fine"

    with (
        FakeWorker(redis_url, queue=queue.queue, answers=moody),
        _client(redis_url, queue) as client,
    ):
        with pytest.raises(EngineFailure):
            client.generate("bad")
        assert client.generate("good").text == "fine"


def test_words_may_be_tokens(redis_url: str, queue: Keys) -> None:
    """With split="words" each word, and the space before it, is a token."""
    with (
        FakeWorker(redis_url, queue=queue.queue, split="words"),
        _client(redis_url, queue) as client,
    ):
        with client.stream("to be or not", logprobs=0) as stream:
            chunks = list(stream)
    assert [chunk.text for chunk in chunks] == ["to", " be", " or", " not"]
    assert all(len(chunk.logprobs or ()) == 1 for chunk in chunks)


def test_successor_goes_on_where_the_first_one_left(redis_url: str, queue: Keys) -> None:
    """A FakeWorker that leaves hands its requests back, and the reader sees no seam."""
    text = "0123456789" * 30
    with _client(redis_url, queue) as client, client.stream(text, max_tokens=None) as stream:
        chunks = iter(stream)
        with FakeWorker(redis_url, queue=queue.queue, token_delay_s=0.02):
            seen = [next(chunks).text for _ in range(20)]
        with FakeWorker(redis_url, queue=queue.queue):
            seen += [chunk.text for chunk in chunks]
        status = client.status(stream.request_id)
    assert "".join(seen) == text
    assert (status.state, status.epoch, status.strikes) == (RequestState.FINISHED, 2, 0)


async def test_it_is_an_async_context_manager_too(redis_url: str, queue: Keys) -> None:
    """An asyncio test enters it like the client."""
    async with (
        FakeWorker(redis_url, queue=queue.queue) as worker,
        AsyncClient(redis_url, queue=queue.queue) as client,
    ):
        assert (await client.generate("Hi")).text == "Hi"
    assert [request.prompt for request in worker.requests] == ["Hi"]


def test_broken_script_is_seen_by_the_test(redis_url: str, queue: Keys) -> None:
    """An exception in the answer function comes out of the with block."""

    def broken(request: RequestMessage) -> str:
        raise ZeroDivisionError

    with _client(redis_url, queue) as client:
        request_id = client.submit("Hi")
        with pytest.raises(ZeroDivisionError):
            with FakeWorker(redis_url, queue=queue.queue, answers=broken) as worker:
                eventually(lambda: worker.requests)
        client.cancel(request_id)


def test_it_waits_for_redis(queue: Keys) -> None:
    """A FakeWorker that starts before its Redis begins to work when Redis is there."""
    with running_server("valkey") as server:
        server.stop()
        with FakeWorker(server.url, queue=queue.queue), _client(server.url, queue) as client:
            server.start()
            assert client.generate("Hi").text == "Hi"
