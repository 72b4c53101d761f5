"""Every public call as a backend writes it; `mypy --strict` must accept it, and infer the types.

Nothing here is run: a wrong type is an error of the type check, which is the test.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import assert_type

from headrace import (
    AsyncClient,
    Chunk,
    Client,
    Completion,
    FinishReason,
    RequestError,
    RequestState,
    RequestStatus,
    RequestTimeout,
    SamplingParams,
    SyncTokenStream,
    Timeout,
    TokenLogprob,
    TokenStream,
)
from headrace.protocol import RequestMessage
from headrace.testing import FakeWorker


async def ask(client: AsyncClient) -> None:
    """Use AsyncClient in every way."""
    answer = await client.generate("Why is the sky blue?", max_tokens=64)
    assert_type(answer, Completion)
    assert_type(answer.text, str)
    assert_type(answer.token_ids, tuple[int, ...])
    assert_type(answer.finish_reason, FinishReason)
    await client.generate([1, 2, 3], sampling=SamplingParams(temperature=0), ttl=30.0)
    await client.generate(
        messages=[{"role": "user", "content": "Hi"}],
        stop=["\n"],
        logit_bias={5: -100.0},
        deadline=datetime.now(UTC),
        timeout=Timeout(first_chunk=None),
        metadata={"trace": "t"},
    )
    answer = await client.generate(
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        tools=[{"type": "function", "function": {"name": "f"}}],
        chat_template_kwargs={"enable_thinking": False},
        response_format={"type": "choice", "choice": ["yes", "no"]},
        include_stop=True,
        bad_words=["maybe"],
        prompt_logprobs=5,
        echo=True,
    )
    assert_type(answer.prompt_logprobs, tuple[TokenLogprob | None, ...] | None)
    assert_type(await client.submit("…", request_id="order-42", priority=0), str)
    assert_type(await client.status("order-42"), RequestStatus)
    assert_type(await client.cancel("order-42", tenant="acme"), RequestState)
    assert_type(await client.finish_now("order-42", tenant="acme"), RequestState)
    assert_type(await client.reprioritise("order-42", 0, tenant="acme"), RequestState)


async def read(client: AsyncClient) -> None:
    """Read streams of AsyncClient."""
    async with client.stream("Hi", seed=1, n=2) as stream:
        assert_type(stream, TokenStream)
        async for chunk in stream:
            assert_type(chunk, Chunk)
            assert_type(chunk.index, int)
    assert_type(stream.completion, Completion)
    async with client.attach("order-42", after=10) as stream:
        assert_type(await stream.read(), Completion)
    async with client.attach("group", after=[3, 5], cancel_on_exit=True) as stream:
        await stream.cancel()


async def ask_many(client: AsyncClient, rows: AsyncIterator[str]) -> None:
    """Use generate_many in both ways, over both kinds of iterables."""
    async for answer in client.generate_many(["a", [1, 2]], max_in_flight=64, max_tokens=5):
        assert_type(answer, Completion)
    async with aclosing(client.generate_many(rows, return_errors=True)) as outcomes:
        async for outcome in outcomes:
            assert_type(outcome, Completion | RequestError | RequestTimeout)
    async for answer in client.generate_many([{"prompt": "a", "request_id": "x"}]):
        assert_type(answer, Completion)


def ask_blocking() -> None:
    """Use Client in every way."""
    with Client("redis://localhost:6379/0", queue="default", tenant="acme") as client:
        assert_type(client.generate("Hi", top_k=5), Completion)
        assert_type(client.submit([1, 2]), str)
        with client.stream("Hi") as stream:
            assert_type(stream, SyncTokenStream)
            for chunk in stream:
                assert_type(chunk, Chunk)
        for answer in client.generate_many(["a", "b"]):
            assert_type(answer, Completion)
        for outcome in client.generate_many(["a"], return_errors=True):
            assert_type(outcome, Completion | RequestError | RequestTimeout)
        assert_type(client.status("x"), RequestStatus)
        assert_type(client.cancel("x"), RequestState)
        assert_type(client.finish_now("x"), RequestState)
        assert_type(client.reprioritise("x", 9), RequestState)


async def make() -> None:
    """Make clients and a worker for tests."""
    async with AsyncClient(timeout=Timeout(total=60.0), max_connections=4) as client:
        assert_type(client, AsyncClient)
    with FakeWorker("redis://localhost:6379/0", answers={"Hi": "Hello"}):
        pass

    def answer(request: RequestMessage) -> str:
        return request.request_id

    async with FakeWorker("redis://localhost:6379/0", answers=answer, token_delay_s=0.01) as worker:
        assert_type(worker.requests, list[RequestMessage])
