"""The run over a batch: its window, its tries, and what it leaves when it is stopped."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from headrace.cli.batch_file import BadLine, BatchRequest, id_digest, read_lines
from headrace.cli.batch_run import MAX_ATTEMPTS, BatchRun
from headrace.cli.result_file import EarlierRun
from headrace.errors import (
    EngineFailure,
    ErrorCode,
    InvalidRequest,
    Overloaded,
    RequestError,
    RequestLost,
    TransportError,
    error_for,
)
from headrace.types import Completion, FinishReason, Usage

Ask = Callable[[BatchRequest, str], Awaitable[Completion]]


def lines(*custom_ids: str) -> io.BytesIO:
    """Good lines, one for each id."""
    entries = [
        {"custom_id": i, "method": "POST", "url": "/v1/completions", "body": {"prompt": i}}
        for i in custom_ids
    ]
    return io.BytesIO("\n".join(map(json.dumps, entries)).encode())


def answer(request: BatchRequest, name: str) -> Completion:
    """An answer that repeats the prompt."""
    return Completion(name, str(request.body.prompt), (1,), FinishReason.STOP, Usage(2, 3))


class Run:
    """A run whose asking is scripted, and what it wrote."""

    def __init__(self, ask: Ask, *, max_in_flight: int = 4, earlier: EarlierRun | None = None):
        self.written: list[dict[str, Any]] = []
        self.batch = BatchRun(
            ask,
            self.written.append,
            batch="batch-x",
            model="m",
            max_in_flight=max_in_flight,
            earlier=earlier or EarlierRun(),
        )

    async def over(self, *custom_ids: str) -> Run:
        """Run over lines with these ids."""
        await self.batch.run(read_lines(lines(*custom_ids)))
        return self

    def error(self) -> dict[str, Any]:
        """The error of the one line that was written."""
        [line] = self.written
        error: dict[str, Any] = line["error"]
        return error


async def test_every_line_gets_its_answer() -> None:
    """Each id has one result line, and tokens are counted."""

    async def ask(request: BatchRequest, name: str) -> Completion:
        return answer(request, name)

    run = await Run(ask).over("a", "b", "c")
    assert sorted(line["custom_id"] for line in run.written) == ["a", "b", "c"]
    counts = run.batch.counts
    assert (counts.num_done, counts.num_prompt_tokens, counts.num_output_tokens) == (3, 6, 9)
    assert counts.num_in_flight == 0


async def test_a_slow_line_does_not_hold_up_the_others() -> None:
    """Results are written as they come, not in the order of the input."""
    is_free = asyncio.Event()

    async def ask(request: BatchRequest, name: str) -> Completion:
        if request.custom_id == "slow":
            await is_free.wait()
        if request.custom_id == "last":
            is_free.set()
        return answer(request, name)

    run = await Run(ask, max_in_flight=2).over("slow", "b", "c", "last")
    assert [line["custom_id"] for line in run.written] == ["b", "c", "last", "slow"]


@pytest.mark.parametrize("max_in_flight", [1, 3])
async def test_the_window_bounds_what_is_read_and_asked(max_in_flight: int) -> None:
    """Never more requests than allowed are under way, and one line is read ahead of them."""
    asking: set[str] = set()
    num_read, most_asking, most_ahead = 0, 0, 0

    async def ask(request: BatchRequest, name: str) -> Completion:
        nonlocal most_asking, most_ahead
        asking.add(name)
        most_asking = max(most_asking, len(asking))
        await asyncio.sleep(0)
        most_ahead = max(most_ahead, num_read - len(run.written) - len(asking))
        asking.remove(name)
        return answer(request, name)

    def counted() -> Iterator[BatchRequest | BadLine]:
        nonlocal num_read
        for item in read_lines(lines(*map(str, range(20)))):
            num_read += 1
            yield item

    run = Run(ask, max_in_flight=max_in_flight)
    await run.batch.run(counted())
    assert (most_asking, len(run.written)) == (max_in_flight, 20)
    assert most_ahead <= 2


async def test_what_an_earlier_run_answered_is_not_asked() -> None:
    """Answered ids are skipped and counted as done."""
    asked: list[str] = []

    async def ask(request: BatchRequest, name: str) -> Completion:
        asked.append(request.custom_id)
        return answer(request, name)

    run = await Run(ask, earlier=EarlierRun(answered=frozenset({id_digest("a")}))).over("a", "b")
    assert asked == ["b"]
    assert (run.batch.counts.num_skipped, run.batch.counts.num_done) == (1, 2)


@pytest.mark.parametrize(
    "error",
    [EngineFailure("x"), RequestLost("x"), error_for(ErrorCode.RESULT_EXPIRED, "x")],
)
async def test_a_passing_failure_is_tried_again_under_another_id(error: RequestError) -> None:
    """The failed try keeps its id in Redis, so the next one has the next number."""
    names: list[str] = []

    async def ask(request: BatchRequest, name: str) -> Completion:
        names.append(name.rpartition(":")[2])
        if len(names) < MAX_ATTEMPTS:
            raise error
        return answer(request, name)

    run = await Run(ask).over("a")
    assert names == ["1", "2", "3"]
    assert run.written[0]["error"] is None


async def test_tries_are_bounded_and_go_on_counting_in_the_next_run() -> None:
    """After a few tries the error is the result; a later run takes the numbers after it."""
    names: list[str] = []

    async def ask(request: BatchRequest, name: str) -> Completion:
        names.append(name.rpartition(":")[2])
        raise EngineFailure("it broke")

    run = await Run(ask, earlier=EarlierRun(attempts={id_digest("a"): 3})).over("a")
    assert names == ["4", "5", "6"]
    assert run.error() == {"code": "engine_failure", "message": "line 1: it broke"}
    assert run.written[0]["response"]["request_id"].endswith(":6")


async def test_a_no_is_not_asked_again() -> None:
    """What the worker refuses is an error line with its code, after one try."""
    num_asked = 0

    async def ask(request: BatchRequest, name: str) -> Completion:
        nonlocal num_asked
        num_asked += 1
        raise error_for(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long", worker_id="w1")

    run = await Run(ask).over("a")
    assert num_asked == 1
    assert run.error()["code"] == "context_length_exceeded"
    assert run.written[0]["response"]["request_id"] is not None


async def test_what_never_reached_the_queue_says_so() -> None:
    """A line that the client refuses has no request id, so a later run reads it again."""

    async def ask(request: BatchRequest, name: str) -> Completion:
        raise InvalidRequest("too large")

    run = await Run(ask).over("a")
    assert run.written[0]["response"]["request_id"] is None


async def test_a_full_queue_is_waited_out_under_the_same_id() -> None:
    """Overloaded is no failure of the line."""
    names: list[str] = []

    async def ask(request: BatchRequest, name: str) -> Completion:
        names.append(name)
        if len(names) < 6:
            raise Overloaded("full", retry_after_s=0.001)
        return answer(request, name)

    run = await Run(ask).over("a")
    assert (len(names), len(set(names))) == (6, 1)
    assert run.written[0]["error"] is None


async def test_an_absent_redis_ends_the_run_and_fails_no_line() -> None:
    """TransportError is raised, and lines without an answer have no result line."""

    async def ask(request: BatchRequest, name: str) -> Completion:
        if request.custom_id == "a":
            return answer(request, name)
        raise TransportError("away")

    run = Run(ask)
    with pytest.raises(TransportError, match="away"):
        await run.over("a", "b", "c")
    assert [line["custom_id"] for line in run.written] == ["a"]


async def test_a_stopped_run_writes_nothing_for_what_is_under_way() -> None:
    """Cancelling ends the asking at once; those lines are the next run's."""
    has_begun = asyncio.Event()

    async def ask(request: BatchRequest, name: str) -> Completion:
        has_begun.set()
        await asyncio.Event().wait()
        return answer(request, name)

    run = Run(ask)
    task = asyncio.ensure_future(run.over("a", "b"))
    await has_begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert run.written == []
    assert run.batch.counts.num_in_flight == 0


async def test_all_n_answers_are_counted() -> None:
    """The output tokens of every choice count."""

    async def ask(request: BatchRequest, name: str) -> Completion:
        one = answer(request, name)
        return Completion(
            name, one.text, one.token_ids, one.finish_reason, one.usage, choices=(one, one)
        )

    run = await Run(ask).over("a")
    assert run.batch.counts.num_output_tokens == 6
    assert len(run.written[0]["response"]["body"]["choices"]) == 2
