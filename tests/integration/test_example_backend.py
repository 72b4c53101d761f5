"""examples/sse_server.py: an answer as server-sent events, and what a closed connection does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from headrace import AsyncClient, ErrorCode
from headrace.testing import FakeWorker
from support.example_runs import Event, backend, read_events
from support.servers import Server
from support.waiting import PATIENCE_S, eventually_async

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)

PROMPT = "Tell me about rivers."
ANSWER = 'A river runs.\n\nIt ends in the sea, "mostly".'  # line breaks and quotes, on purpose


@pytest.fixture(scope="module")
def url(shared_server: Callable[[str], Server]) -> Iterator[str]:
    """Give the address of one backend for the whole module."""
    with backend(shared_server("valkey").url) as address:
        yield address


async def _ask(url: str) -> list[Event]:
    async with (
        httpx.AsyncClient(timeout=PATIENCE_S) as http,
        http.stream("POST", f"{url}/chat", json={"prompt": PROMPT}) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        return [event async for event in read_events(response)]


async def test_an_answer_comes_as_chunks_and_one_done(redis_url: str, url: str) -> None:
    """Texts join to the answer, ids are offsets to go on from, and `done` says why it ended."""
    with FakeWorker(redis_url, answers={PROMPT: ANSWER}):
        events = await _ask(url)
    assert "".join(event.data["text"] for event in events[:-1]) == ANSWER
    offsets = [event.offset for event in events[:-1] if event.offset is not None]
    assert offsets == sorted(set(offsets))
    assert offsets[-1] == len(ANSWER)
    assert (events[-1].name, events[-1].data) == ("done", {"finish_reason": "stop"})


async def test_a_reader_that_leaves_cancels_the_request(redis_url: str, url: str) -> None:
    """Closing the connection after the first chunk stops the work in the queue."""
    question = {"prompt": PROMPT, "max_tokens": 4000}
    with FakeWorker(redis_url, answers={PROMPT: ANSWER * 100}, token_delay_s=0.01):
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http, AsyncClient(redis_url) as client:
            async with http.stream("POST", f"{url}/chat", json=question) as response:
                first = await anext(read_events(response))
            request_id = response.headers["x-request-id"]

            async def is_cancelled() -> bool:
                return (await client.status(request_id)).state == "cancelled"

            await eventually_async(is_cancelled)
    assert first.name == "chunk"


async def test_wrong_parameters_are_refused_before_anything_is_queued(
    redis_url: str, url: str
) -> None:
    """The answer is 400 with a message that names the value."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        response = await http.post(f"{url}/chat", json={"prompt": PROMPT, "max_tokens": 0})
    assert response.status_code == 400
    assert "max_tokens" in response.json()["error"]


async def test_a_failure_of_the_worker_is_the_last_event(redis_url: str, url: str) -> None:
    """After the status line an error can only be an event, and there is exactly one."""
    with FakeWorker(redis_url, fail_with=ErrorCode.ENGINE_FAILURE):
        events = await _ask(url)
    assert [event.name for event in events] == ["error"]
    assert "engine_failure" in events[0].data["error"]


async def test_a_full_queue_is_503_with_a_time_to_come_back(redis_url: str) -> None:
    """With its bound reached, the backend sheds load instead of queueing more."""
    with backend(redis_url, MAX_QUEUED="1") as url:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http, AsyncClient(redis_url) as client:
            waiting = await client.submit("first in line")
            response = await http.post(f"{url}/chat", json={"prompt": PROMPT})
            await client.cancel(waiting)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
