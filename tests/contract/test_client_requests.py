"""What both clients do with single requests: ids, answers, refusals, status, cancellation."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from redis import Redis

from headrace import (
    EngineFailure,
    ErrorCode,
    FinishReason,
    InvalidRequest,
    Overloaded,
    QueueBound,
    RequestCancelled,
    RequestConflict,
    RequestError,
    RequestExpired,
    RequestNotFound,
    RequestState,
    UnknownModel,
)
from headrace.keys import Keys
from headrace.protocol import decode_request
from headrace.submission import seed_of
from headrace.testing import FakeWorker
from support.any_client import AnyClient
from support.client_fixtures import Connect
from support.queue_driver import TENANT, QueueDriver
from support.waiting import eventually


async def test_generate_returns_the_whole_answer(
    any_client: AnyClient, fake_worker: FakeWorker
) -> None:
    """A completion holds text, token ids, reason, counts, times and the caller's metadata."""
    answer = await any_client.generate("Hi!", metadata={"trace": "t1"})
    assert answer.text == "Hi!"
    assert answer.token_ids == (72, 105, 33)
    assert answer.finish_reason is FinishReason.STOP
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 3)
    assert answer.timings is not None
    assert answer.timings.e2e_s >= answer.timings.queue_s >= 0
    assert answer.metadata == {"trace": "t1"}


async def test_options_reach_the_worker(any_client: AnyClient, fake_worker: FakeWorker) -> None:
    """The worker gets the prompt and the options as they were given."""
    answer = await any_client.generate(
        messages=[{"role": "user", "content": "abcdef"}], max_tokens=4, temperature=0, model="m"
    )
    (request,) = fake_worker.requests
    assert request.messages == ({"role": "user", "content": "abcdef"},)
    assert (request.sampling.max_tokens, request.sampling.temperature) == (4, 0.0)
    assert (request.model, request.tenant) == ("m", TENANT)
    assert (answer.text, answer.finish_reason) == ("abcd", FinishReason.LENGTH)


async def test_token_ids_travel_as_they_are(any_client: AnyClient, fake_worker: FakeWorker) -> None:
    """A prompt of token ids is not tokenized again."""
    await any_client.generate([72, 105])
    assert fake_worker.requests[0].prompt == (72, 105)


async def test_unseeded_request_has_the_seed_of_its_id(
    any_client: AnyClient, driver: QueueDriver
) -> None:
    """The client chooses the seed before the first try, so every try draws the same tokens."""
    await any_client.submit("Hi", request_id="order-42")
    payload = decode_request(driver.grant().payload)
    assert payload.sampling.seed == seed_of("order-42")


async def test_submitting_again_is_the_same_request(
    any_client: AnyClient, driver: QueueDriver
) -> None:
    """The same id with the same payload queues nothing new (B37)."""
    first = await any_client.submit("Hi", request_id="order-42", max_tokens=16)
    again = await any_client.submit("Hi", request_id="order-42", max_tokens=16)
    assert first == again == "order-42"
    assert driver.depth().queued == 1


async def _bring_to(state: str, driver: QueueDriver, redis: Redis) -> None:
    if state == "queued":
        return
    grant = driver.grant()
    driver.emit(grant, num_tokens=2)
    if state == "running":
        return
    driver.finish(grant, 2)
    if state == "expired":
        redis.delete(driver.keys.token_log(TENANT, grant.request_id))


@pytest.mark.parametrize("state", ["queued", "running", "done", "expired"])
async def test_other_payload_under_a_taken_id_is_a_conflict(
    state: str, any_client: AnyClient, driver: QueueDriver, client: Redis
) -> None:
    """Whatever has become of a request, its id cannot be used for another payload."""
    await any_client.submit("Hi", request_id="order-42")
    await _bring_to(state, driver, client)
    with pytest.raises(RequestConflict, match="order-42"):
        await any_client.generate("Bye", request_id="order-42")
    client.flushall()


@pytest.mark.parametrize("state", ["queued", "running"])
async def test_same_payload_joins_the_request_under_way(
    state: str, any_client: AnyClient, driver: QueueDriver, client: Redis
) -> None:
    """Who asks again while the request waits or runs reads its stream from the beginning."""
    await any_client.submit("Hi", request_id="order-42")
    await _bring_to(state, driver, client)
    async with any_client.stream("Hi", request_id="order-42") as stream:
        grant = driver.grant("w1") if state == "queued" else None
        if grant is None:
            assert (await anext(aiter(stream))).token_ids == (0, 1)
            return
        driver.emit(grant, num_tokens=2)
        assert (await anext(aiter(stream))).token_ids == (0, 1)


async def test_same_payload_after_the_end_reads_the_result_again(
    any_client: AnyClient, driver: QueueDriver, client: Redis
) -> None:
    """Who asks again after the end gets the same answer, and nothing runs twice."""
    await any_client.submit("Hi", request_id="order-42")
    await _bring_to("done", driver, client)
    answer = await any_client.generate("Hi", request_id="order-42")
    assert answer.token_ids == (0, 1)
    assert driver.claim().grants == ()


async def test_same_payload_after_the_result_is_gone_is_expired(
    any_client: AnyClient, driver: QueueDriver, client: Redis
) -> None:
    """Who asks again when the result is gone is told so, and no second run begins."""
    await any_client.submit("Hi", request_id="order-42")
    await _bring_to("expired", driver, client)
    with pytest.raises(RequestExpired, match="finished"):
        await any_client.generate("Hi", request_id="order-42")
    assert driver.claim().grants == ()
    client.flushall()


async def test_result_outlives_its_end_by_result_ttl(
    connect: Connect, fake_worker: FakeWorker, client: Redis, queue: Keys
) -> None:
    """A result can be read until result_ttl is over, and is expired, not unknown, afterwards."""
    any_client, log = connect(result_ttl=300), queue.token_log(TENANT, "r1")
    await any_client.generate("Hi", request_id="r1")
    assert (await _attached(any_client, "r1")) == "Hi"
    assert 200_000 < client.pttl(log) <= 300_000
    client.pexpire(log, 1)
    eventually(lambda: not client.exists(log))
    with pytest.raises(RequestExpired):
        await _attached(any_client, "r1")


async def _attached(any_client: AnyClient, request_id: str) -> str:
    async with any_client.attach(request_id) as stream:
        return (await stream.read()).text


@pytest.mark.parametrize("call", ["attach", "status", "cancel"])
async def test_unknown_id_is_not_found(call: str, any_client: AnyClient) -> None:
    """An id that the queue never heard of is told apart at once."""
    ask = {"attach": lambda: _attached(any_client, "never")}
    with pytest.raises(RequestNotFound, match="'never'"):
        await ask.get(call, lambda: getattr(any_client, call)("never"))()


async def test_status_tells_the_truth(any_client: AnyClient, driver: QueueDriver) -> None:
    """Status follows a request from the queue through its worker to its end."""
    await any_client.submit("Hi", request_id="r1", priority=2)
    queued = await any_client.status("r1")
    assert (queued.state, queued.priority, queued.epoch) == (RequestState.QUEUED, 2, 0)
    grant = driver.grant("w7")
    driver.emit(grant, num_tokens=3, worker_id="w7")
    running = await any_client.status("r1")
    assert (running.state, running.owner, running.num_tokens) == (RequestState.RUNNING, "w7", 3)
    driver.finish(grant, 3, worker_id="w7")
    assert (await any_client.status("r1")).state is RequestState.FINISHED


async def test_cancelling_a_queued_request_ends_it(
    any_client: AnyClient, driver: QueueDriver
) -> None:
    """A request that nobody runs is cancelled at once, and its reader learns it."""
    await any_client.submit("Hi", request_id="r1")
    async with any_client.attach("r1") as stream:
        assert await any_client.cancel("r1") is RequestState.CANCELLED
        with pytest.raises(RequestCancelled):
            await stream.read()


async def test_cancelling_a_running_request_stops_it(
    any_client: AnyClient, redis_url: str, queue: Keys
) -> None:
    """A worker that runs the request stops, and its reader learns it."""
    with FakeWorker(redis_url, queue=queue.queue, token_delay_s=0.005):
        async with any_client.stream("x" * 5000, max_tokens=5000) as stream:
            chunks = aiter(stream)
            await anext(chunks)
            await stream.cancel()
            with pytest.raises(RequestCancelled):
                async for _ in chunks:
                    pass


async def test_full_queue_is_overloaded(connect: Connect, driver: QueueDriver) -> None:
    """Beyond max_queued a request is refused, with the time after which to come back."""
    any_client = connect(max_queued=1)
    await any_client.submit("Hi")
    with pytest.raises(Overloaded) as caught:
        await any_client.submit("Hi")
    assert caught.value.retry_after > 0
    assert caught.value.retryable
    assert caught.value.bound is QueueBound.QUEUE


async def test_a_full_tenant_is_overloaded_alone(connect: Connect, driver: QueueDriver) -> None:
    """Beyond max_queued_per_tenant one tenant is refused, and the error says that it is its own."""
    any_client = connect(max_queued_per_tenant=1)
    await any_client.submit("Hi")
    with pytest.raises(Overloaded, match="tenant") as caught:
        await any_client.submit("Hi")
    assert caught.value.bound is QueueBound.TENANT
    await any_client.submit("Hi", tenant="other")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (ErrorCode.CONTEXT_LENGTH_EXCEEDED, InvalidRequest),
        (ErrorCode.UNKNOWN_MODEL, UnknownModel),
        (ErrorCode.ENGINE_FAILURE, EngineFailure),
    ],
)
async def test_worker_refusal_is_a_typed_error(
    code: ErrorCode,
    expected: type[RequestError],
    any_client: AnyClient,
    redis_url: str,
    queue: Keys,
) -> None:
    """What a worker answers on the wire becomes the exception of that code, with its worker."""
    with FakeWorker(redis_url, queue=queue.queue, fail_with=code) as worker:
        with pytest.raises(expected) as caught:
            await any_client.generate("Hi", request_id="r1")
    assert (caught.value.code, caught.value.request_id) == (code, "r1")
    assert caught.value.worker_id == worker.worker_id


async def test_tenants_do_not_meet(any_client: AnyClient, fake_worker: FakeWorker) -> None:
    """The same id under two tenants names two requests."""
    one = await any_client.generate("one", request_id="r1")
    two = await any_client.generate("two", request_id="r1", tenant="other")
    assert (one.text, two.text) == ("one", "two")
    assert (await any_client.status("r1", tenant="other")).num_tokens == 3


async def test_deadline_ends_a_request_that_nobody_took(
    any_client: AnyClient, driver: QueueDriver
) -> None:
    """A request whose ttl is over before a worker comes is expired for its reader."""
    await any_client.submit("Hi", request_id="r1", ttl=0.02)
    eventually(lambda: driver.reap(lease_ms=4).expired)
    with pytest.raises(RequestExpired):
        await _attached(any_client, "r1")


async def test_deadline_may_be_a_date(any_client: AnyClient, driver: QueueDriver) -> None:
    """An aware datetime and Unix seconds say the same."""
    at = datetime.now(UTC) + timedelta(minutes=5)
    await any_client.submit("Hi", request_id="a", deadline=at)
    await any_client.submit("Hi", request_id="b", deadline=at.timestamp())
    deadlines = {driver.status(name).deadline_at_s for name in ("a", "b")}
    assert deadlines == {int(at.timestamp() * 1000) / 1000}
