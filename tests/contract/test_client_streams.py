"""What both clients do with a stream: order, resumption, timeouts, loss, leaving early."""

from __future__ import annotations

import time

import pytest
from redis import Redis

from headrace import (
    DeadlineExceeded,
    FirstChunkTimeout,
    InvalidRequest,
    ProtocolError,
    RequestLost,
    RequestState,
    RequestTimeout,
    StreamConsumed,
    StreamStalled,
    StreamUnfinished,
    Timeout,
)
from headrace.errors import ConfigurationError
from headrace.keys import Keys
from headrace.protocol import CHUNK_FIELD, ChunkMessage, encode_chunk
from headrace.testing import FakeWorker
from support.any_client import AnyClient
from support.queue_driver import TENANT, QueueDriver
from support.waiting import PATIENCE_S


async def test_chunks_come_in_order_and_once(
    any_client: AnyClient, fake_worker: FakeWorker
) -> None:
    """Each chunk begins where the one before ended, and together they are the completion."""
    async with any_client.stream("Streams are neat.") as stream:
        chunks = await stream.chunks()
    assert [chunk.index for chunk in chunks] == list(range(17))
    assert "".join(chunk.text for chunk in chunks) == stream.completion.text == "Streams are neat."


async def test_chunk_arrives_while_the_request_runs(
    any_client: AnyClient, driver: QueueDriver
) -> None:
    """A chunk is there as soon as the worker emits it, not when the request ends."""
    async with any_client.stream("Hi", request_id="r1") as stream:
        grant = driver.grant()
        chunks = aiter(stream)
        for offset in range(3):
            driver.emit(grant, offset)
            assert (await anext(chunks)).index == offset
        with pytest.raises(StreamUnfinished):
            _ = stream.completion
        driver.finish(grant, 3)
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)
    assert stream.completion.token_ids == (0, 1, 2)


@pytest.mark.parametrize("after", [0, 1, 4, 5, 6])
async def test_attach_goes_on_at_the_very_token(
    after: int, any_client: AnyClient, driver: QueueDriver
) -> None:
    """Attaching after k tokens gives token k and all later ones, also out of a chunk's middle."""
    await any_client.submit("Hi", request_id="r1")
    grant = driver.grant()
    driver.emit(grant, 0, num_tokens=2)
    driver.emit(grant, 2, num_tokens=4)
    driver.finish(grant, 6)
    async with any_client.attach("r1", after=after) as stream:
        chunks = await stream.chunks()
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    assert token_ids == list(range(after, 6))
    assert stream.completion.token_ids == tuple(token_ids)
    assert stream.completion.text == "x" * (6 - after)


async def test_attach_beyond_the_end_is_refused(any_client: AnyClient, driver: QueueDriver) -> None:
    """An offset that a finished request never reached is an error, not a long wait."""
    await any_client.submit("Hi", request_id="r1")
    grant = driver.grant()
    driver.finish(grant, 0)
    async with any_client.attach("r1", after=3) as stream:
        with pytest.raises(InvalidRequest, match="after 3 lies beyond its 0 tokens"):
            await stream.read()


async def test_takeover_is_invisible(any_client: AnyClient, driver: QueueDriver) -> None:
    """When another worker goes on, the reader sees every token once."""
    async with any_client.stream("Hi", request_id="r1") as stream:
        first = driver.grant("w1")
        driver.emit(first, 0, num_tokens=3)
        driver.release(first, worker_id="w1")
        second = driver.grant("w2")
        driver.emit(second, second.num_tokens, num_tokens=2, worker_id="w2")
        driver.finish(second, 5, worker_id="w2")
        assert (await stream.read()).token_ids == (0, 1, 2, 3, 4)


async def test_two_streams_read_one_request(any_client: AnyClient, driver: QueueDriver) -> None:
    """Streams of the same request in one client do not disturb each other."""
    await any_client.submit("Hi", request_id="r1")
    grant = driver.grant()
    driver.emit(grant, 0, num_tokens=4)
    async with any_client.attach("r1") as whole, any_client.attach("r1", after=3) as rest:
        first = await anext(aiter(whole))
        last = await anext(aiter(rest))
    assert (first.token_ids, last.token_ids) == ((0, 1, 2, 3), (3,))


async def test_leaving_early_cancels(any_client: AnyClient, driver: QueueDriver) -> None:
    """Who leaves a stream before its end has no use for the rest, and the request is cancelled."""
    async with any_client.stream("Hi", request_id="r1"):
        pass
    assert driver.status().state is RequestState.CANCELLED


async def test_leaving_by_an_exception_cancels(any_client: AnyClient, driver: QueueDriver) -> None:
    """An exception in the caller's own code cancels the request, and comes through."""
    with pytest.raises(KeyError):
        async with any_client.stream("Hi", request_id="r1"):
            raise KeyError
    assert driver.status().state is RequestState.CANCELLED


@pytest.mark.parametrize("way", ["attach", "stream that keeps"])
async def test_leaving_may_let_the_request_go_on(
    way: str, any_client: AnyClient, driver: QueueDriver
) -> None:
    """A reader that only attached, or that says so, leaves the request alone."""
    await any_client.submit("Hi", request_id="r1")
    stream = (
        any_client.attach("r1")
        if way == "attach"
        else any_client.stream("Hi", request_id="r1", cancel_on_exit=False)
    )
    async with stream:
        pass
    assert driver.status().state is RequestState.QUEUED


async def test_stream_is_for_one_use(any_client: AnyClient, fake_worker: FakeWorker) -> None:
    """Iterating a second time is an error, not an empty answer."""
    async with any_client.stream("Hi") as stream:
        await stream.read()
        with pytest.raises(StreamConsumed):
            await stream.read()


async def test_stream_must_be_opened(any_client: AnyClient) -> None:
    """A stream that was never entered says so, and has sent nothing."""
    stream = any_client.stream("Hi")
    with pytest.raises(ConfigurationError, match="open the stream first"):
        await stream.read()
    with pytest.raises(StreamUnfinished, match="was not opened"):
        _ = stream.completion


async def _timeout_of(any_client: AnyClient, timeout: Timeout) -> RequestTimeout:
    began_s = time.monotonic()
    with pytest.raises(RequestTimeout) as caught:
        async with any_client.attach("r1", timeout=timeout) as stream:
            await stream.read()
    assert time.monotonic() - began_s < PATIENCE_S
    return caught.value


async def test_first_chunk_timeout(any_client: AnyClient) -> None:
    """Without a worker, waiting ends after the time allowed for the first chunk."""
    await any_client.submit("Hi", request_id="r1")
    error = await _timeout_of(any_client, Timeout(first_chunk=0.1))
    assert isinstance(error, FirstChunkTimeout)
    assert (error.request_id, error.waited_s) == ("r1", 0.1)


async def test_stalled_stream_timeout(any_client: AnyClient, driver: QueueDriver) -> None:
    """When chunks stop coming, waiting ends after the time allowed between two."""
    await any_client.submit("Hi", request_id="r1")
    driver.emit(driver.grant())
    error = await _timeout_of(any_client, Timeout(between_chunks=0.1))
    assert isinstance(error, StreamStalled)


async def test_total_timeout(any_client: AnyClient, redis_url: str, queue: Keys) -> None:
    """However well chunks flow, waiting ends when the total time is over."""
    await any_client.submit("x" * 100_000, request_id="r1", max_tokens=100_000)
    with FakeWorker(redis_url, queue=queue.queue):
        error = await _timeout_of(any_client, Timeout(total=0.2))
    assert isinstance(error, DeadlineExceeded)


async def test_timeout_cancels_what_it_waited_for(
    any_client: AnyClient, driver: QueueDriver
) -> None:
    """A request that nobody waits for any more does not stay in the queue."""
    with pytest.raises(FirstChunkTimeout):
        await any_client.generate("Hi", request_id="r1", timeout=Timeout(first_chunk=0.05))
    assert driver.status().state is RequestState.CANCELLED


async def test_gap_in_the_log_is_an_error(
    any_client: AnyClient, client: Redis, queue: Keys
) -> None:
    """A log that skips tokens raises ProtocolError; nothing is passed over in silence."""
    await any_client.submit("Hi", request_id="r1")
    log = queue.token_log(TENANT, "r1")
    client.xadd(log, {CHUNK_FIELD: encode_chunk(ChunkMessage((1,), ("a",)))}, id="1-0")
    client.xadd(log, {CHUNK_FIELD: encode_chunk(ChunkMessage((3,), ("c",)))}, id="3-0")
    async with any_client.attach("r1", cancel_on_exit=True) as stream:
        with pytest.raises(ProtocolError, match="skips from offset 1 to 2"):
            await stream.read()


async def test_unreadable_chunk_is_an_error(
    any_client: AnyClient, client: Redis, queue: Keys
) -> None:
    """Bytes in a log that are no chunk raise ProtocolError."""
    await any_client.submit("Hi", request_id="r1")
    client.xadd(queue.token_log(TENANT, "r1"), {CHUNK_FIELD: b"\xc1"}, id="1-0")
    async with any_client.attach("r1", cancel_on_exit=True) as stream:
        with pytest.raises(ProtocolError, match="unreadable chunk"):
            await stream.read()


@pytest.mark.parametrize("lost", ["everything", "the log"])
async def test_lost_request_is_told(
    lost: str, any_client: AnyClient, driver: QueueDriver, client: Redis
) -> None:
    """When Redis loses a request that is being read, its reader is told within seconds."""
    async with any_client.stream("Hi", request_id="r1") as stream:
        grant = driver.grant()
        driver.emit(grant, num_tokens=2)
        chunks = aiter(stream)
        await anext(chunks)
        driver.emit(grant, 2)
        assert (await anext(chunks)).index == 2
        client.flushall()
        if lost == "the log":
            _revive_without_log(client, driver.keys)
        with pytest.raises(RequestLost):
            await anext(chunks)
    client.flushall()


def _revive_without_log(client: Redis, keys: Keys) -> None:
    """Put back what the queue knows of the request, five tokens on, but not its log."""
    fields = {"state": "running", "num_tokens": 5, "epoch": 1, "strikes": 0, "lane": 5}
    client.hset(keys.request(TENANT, "r1"), mapping={**fields, "enqueued_ms": 1})


async def test_slow_reader_gets_everything(
    any_client: AnyClient, redis_url: str, queue: Keys
) -> None:
    """A reader that pauses while far more is produced than it buffers misses nothing."""
    text = "0123456789" * 200
    with FakeWorker(redis_url, queue=queue.queue):
        async with any_client.stream(text, request_id="r1", max_tokens=None) as stream:
            chunks = aiter(stream)
            seen = [(await anext(chunks)).text]
            while (await any_client.status("r1")).state is not RequestState.FINISHED:
                pass
            seen += [chunk.text async for chunk in chunks]
    assert "".join(seen) == text
