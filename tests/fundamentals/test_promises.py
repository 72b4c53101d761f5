"""The promises of the README, as a backend would see them."""

from __future__ import annotations

import pytest

from headrace import (
    AsyncClient,
    Client,
    ErrorCode,
    InvalidRequest,
    Overloaded,
    RequestConflict,
    RequestError,
    RequestNotFound,
)
from headrace.testing import FakeWorker
from support.waiting import eventually

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)

ANSWER = "one two three four five six seven eight nine ten"


async def test_a_stream_is_in_order_without_gap_or_repeat(redis_url: str) -> None:
    """Each chunk begins where the one before it ended, and the texts join to the answer."""
    with FakeWorker(redis_url):
        async with AsyncClient(redis_url) as client, client.stream(ANSWER) as stream:
            chunks = [chunk async for chunk in stream]
    ends = [chunk.index + len(chunk.token_ids) for chunk in chunks]
    assert [chunk.index for chunk in chunks] == [0, *ends[:-1]]
    assert "".join(chunk.text for chunk in chunks) == stream.completion.text == ANSWER


def test_a_reader_does_not_notice_that_the_worker_changed(redis_url: str) -> None:
    """A stream that one worker began and another finished is one answer."""
    with Client(redis_url) as client:
        request_id = client.submit(ANSWER)
        with FakeWorker(redis_url, token_delay_s=0.2):
            eventually(lambda: client.status(request_id).num_tokens >= 5)
        begun = client.status(request_id)
        with FakeWorker(redis_url), client.attach(request_id) as stream:
            answer = stream.read()
    assert 5 <= begun.num_tokens < len(ANSWER)
    assert answer.text == ANSWER


def test_a_reader_can_go_on_where_it_stopped(redis_url: str) -> None:
    """Attaching after four tokens gives the fifth and what follows."""
    with FakeWorker(redis_url), Client(redis_url) as client:
        request_id = client.submit(ANSWER)
        with client.attach(request_id, after=4) as stream:
            chunks = list(stream)
    assert chunks[0].index == 4
    assert "".join(chunk.text for chunk in chunks) == ANSWER[4:]


def test_a_result_can_be_read_again(redis_url: str) -> None:
    """Two readers, one after the other, get the same tokens."""
    with FakeWorker(redis_url), Client(redis_url) as client:
        request_id = client.submit(ANSWER)
        answers = []
        for _ in range(2):
            with client.attach(request_id) as stream:
                answers.append(stream.read())
    assert answers[0].token_ids == answers[1].token_ids


@pytest.mark.parametrize("code", [ErrorCode.ENGINE_FAILURE, ErrorCode.CONTEXT_LENGTH_EXCEEDED])
def test_a_request_that_cannot_be_answered_ends_with_its_reason(
    redis_url: str, code: ErrorCode
) -> None:
    """A refusal reaches the reader as a typed error, at once and not as silence."""
    with FakeWorker(redis_url, fail_with=code), Client(redis_url) as client:
        with pytest.raises(RequestError) as caught:
            client.generate("too much")
    assert caught.value.code is code


def test_wrong_arguments_are_refused_before_anything_is_queued(redis_url: str) -> None:
    """A parameter out of range is named, and the queue never heard of the request."""
    with Client(redis_url) as client:
        with pytest.raises(InvalidRequest, match="temperature must be at least 0"):
            client.submit("Hi", temperature=-1.0, request_id="wrong")
        with pytest.raises(RequestNotFound):
            client.status("wrong")


def test_submitting_twice_is_one_request(redis_url: str) -> None:
    """The same id and payload attach; the same id with another payload is a conflict."""
    with Client(redis_url) as client:
        assert client.submit("Hi", request_id="order-42", seed=1) == "order-42"
        assert client.submit("Hi", request_id="order-42", seed=1) == "order-42"
        with pytest.raises(RequestConflict):
            client.submit("Ho", request_id="order-42", seed=1)
        client.cancel("order-42")


def test_a_full_queue_says_so(redis_url: str) -> None:
    """Beyond its bound the queue takes nothing, and tells when to come back."""
    with Client(redis_url, max_queued=1) as client:
        waiting = client.submit("first")
        with pytest.raises(Overloaded) as caught:
            client.submit("second")
        client.cancel(waiting)
    assert caught.value.retryable
    assert caught.value.retry_after > 0


def test_an_unknown_request_is_an_error_and_not_a_wait(redis_url: str) -> None:
    """Attaching to an id that nobody submitted fails at once."""
    with Client(redis_url) as client, pytest.raises(RequestNotFound, match="never-heard-of"):
        client.attach("never-heard-of").__enter__()


def test_a_cancelled_request_is_never_granted(redis_url: str) -> None:
    """Cancelling what waits ends it at once; a worker that comes later does not see it."""
    with Client(redis_url) as client:
        request_id = client.submit("too late")
        assert client.cancel(request_id) == "cancelled"
        with FakeWorker(redis_url) as worker:
            client.generate("marker")
    assert [request.prompt for request in worker.requests] == ["marker"]
