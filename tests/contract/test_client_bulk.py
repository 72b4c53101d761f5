"""generate_many: bounded, in the order of completion, one failure for all or each for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

import pytest

from headrace import (
    AsyncClient,
    Completion,
    ErrorCode,
    InvalidRequest,
    RequestError,
    RequestState,
    Timeout,
    functions,
)
from headrace.errors import ConfigurationError, error_for
from headrace.keys import Keys
from headrace.protocol import RequestMessage
from headrace.testing import FakeWorker
from support.any_client import AnyClient
from support.client_fixtures import Connect
from support.queue_driver import TENANT, QueueDriver
from support.waiting import eventually_async


async def test_every_prompt_is_answered_once(
    any_client: AnyClient, fake_worker: FakeWorker
) -> None:
    """Two hundred prompts of all lengths come back, each under the number of its prompt."""
    prompts = ["x" * (1 + i % 7) for i in range(200)]
    answers = {
        answer.request_id: answer.text
        async for answer in any_client.generate_many(prompts, request_id="run")
    }
    assert answers == {f"run:{i}": prompt for i, prompt in enumerate(prompts)}
    assert len(fake_worker.requests) == 200


async def test_short_answers_overtake_long_ones(any_client: AnyClient, driver: QueueDriver) -> None:
    """Results come in the order of completion, not of submission."""
    outcomes = any_client.generate_many(["long", "short"], request_id="run")
    first = asyncio.create_task(anext(outcomes))
    for number in range(2):
        await eventually_async(partial(_is_queued, driver, f"run:{number}"))
    grants = {grant.request_id: grant for grant in driver.claim().grants}
    driver.finish(grants["run:1"])
    assert (await first).request_id == "run:1"
    driver.finish(grants["run:0"])
    assert [outcome.request_id async for outcome in outcomes] == ["run:0"]


async def test_prompts_are_read_as_they_are_needed(
    any_client: AnyClient, fake_worker: FakeWorker
) -> None:
    """At most max_in_flight prompts are ahead of the results that were taken."""
    num_read = 0

    def prompts() -> Iterator[str]:
        nonlocal num_read
        while num_read < 100:
            num_read += 1
            yield "x"

    num_taken = 0
    async for _ in any_client.generate_many(prompts(), max_in_flight=5):
        num_taken += 1
        assert num_read - num_taken <= 5
    assert num_taken == 100


async def test_items_may_have_options_of_their_own(
    any_client: AnyClient, fake_worker: FakeWorker
) -> None:
    """An item may be token ids, or a map that overrides the shared options."""
    items = [
        [72, 105],
        {"prompt": "abcdef", "max_tokens": 2, "request_id": "own"},
        {"messages": [{"role": "user", "content": "chat"}], "metadata": {"row": 3}},
    ]
    answers = {a.text: a async for a in any_client.generate_many(items, max_tokens=5)}
    assert sorted(answers) == ["Hi", "ab", "chat"]
    assert answers["ab"].request_id == "own"
    assert answers["chat"].metadata == {"row": 3}


def _refuse_odd(request: RequestMessage) -> str:
    if len(str(request.prompt)) % 2:
        raise error_for(ErrorCode.ENGINE_FAILURE, "odd")
    return "even"


async def test_first_failure_is_raised_and_cancels_the_rest(
    any_client: AnyClient, driver: QueueDriver
) -> None:
    """By default one failure ends the run, and nothing of it goes on."""
    items = ["good", {"prompt": "", "request_id": "bad"}]
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        async for _ in any_client.generate_many(items, request_id="run"):
            pass
    assert driver.status("run:0").state is RequestState.CANCELLED


async def test_failures_may_be_yielded(any_client: AnyClient, redis_url: str, queue: Keys) -> None:
    """With return_errors each failure stands in the place of its result, under its own id."""
    items = ["even", "odd", ""]
    with FakeWorker(redis_url, queue=queue.queue, answers=_refuse_odd):
        outcomes = [
            outcome
            async for outcome in any_client.generate_many(
                items, request_id="run", return_errors=True
            )
        ]
    found = {
        o.request_id: o.text if isinstance(o, Completion) else type(o).__name__ for o in outcomes
    }
    assert found == {"run:0": "even", "run:1": "EngineFailure", "run:2": "InvalidRequest"}


async def test_timeouts_may_be_yielded(any_client: AnyClient, driver: QueueDriver) -> None:
    """A request that nobody answers in time is a failure like others."""
    timeout = Timeout(first_chunk=0.05)
    outcomes = [
        o async for o in any_client.generate_many(["a"], timeout=timeout, return_errors=True)
    ]
    assert [type(o).__name__ for o in outcomes] == ["FirstChunkTimeout"]
    assert driver.depth().queued == 0


async def test_full_queue_is_waited_out(connect: Connect, redis_url: str, queue: Keys) -> None:
    """More requests than the queue may hold go through, one after the other."""
    any_client = connect(max_queued=2)
    with FakeWorker(redis_url, queue=queue.queue, max_num_seqs=1, token_delay_s=0.001):
        texts = [a.text async for a in any_client.generate_many(["ab"] * 5)]
    assert texts == ["ab"] * 5


async def test_leaving_early_cancels_what_is_under_way(
    any_client: AnyClient, driver: QueueDriver
) -> None:
    """Ending the iteration leaves nothing running."""
    outcomes = any_client.generate_many(["a"] * 3, request_id="run", return_errors=True)
    first = asyncio.create_task(anext(outcomes))
    for number in range(3):  # in whatever order they come
        await eventually_async(partial(_is_queued, driver, f"run:{number}"))
    driver.cancel("run:0")
    assert isinstance(await first, RequestError)
    await outcomes.aclose()
    states = {driver.status(f"run:{i}").state for i in range(3)}
    assert states == {RequestState.CANCELLED}


async def _is_queued(driver: QueueDriver, request_id: str) -> bool:
    return (
        driver.run(functions.status(driver.keys, tenant=TENANT, request_id=request_id)) is not None
    )


@pytest.mark.parametrize("prompts", ["one text", b"bytes", {"prompt": "x"}])
async def test_one_prompt_is_not_many(prompts: object, any_client: AnyClient) -> None:
    """A text in the place of a list is surely a mistake, and is refused."""
    with pytest.raises(ConfigurationError, match="several prompts"):
        async for _ in any_client.generate_many(prompts):
            pass


@pytest.mark.parametrize("max_in_flight", [0, -1, 1.5, True])
async def test_bound_must_be_positive(max_in_flight: object, any_client: AnyClient) -> None:
    """A bound that lets nothing through is refused."""
    with pytest.raises(ConfigurationError, match="max_in_flight"):
        async for _ in any_client.generate_many(["x"], max_in_flight=max_in_flight):
            pass


async def test_leaving_the_loop_cancels_what_is_under_way(
    any_client: AnyClient, redis_url: str, queue: Keys
) -> None:
    """After a break and the end of the client, nobody works for a caller who has left."""
    prompts = ["quick", *("slow" * 1000 for _ in range(9))]
    with FakeWorker(redis_url, queue=queue.queue, token_delay_s=0.01):
        async with AsyncClient(redis_url, queue=queue.queue, tenant=TENANT) as client:
            async for _ in client.generate_many(
                prompts, max_in_flight=10, request_id="run", max_tokens=None
            ):
                break

        async def are_cancelled() -> bool:
            others = [await any_client.status(f"run:{n}", tenant=TENANT) for n in range(1, 10)]
            return all(status.state is RequestState.CANCELLED for status in others)

        assert await eventually_async(are_cancelled)
