"""Many requests at a time: the bound, the order, what failures and early ends leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import pytest

from headrace import Timeout
from headrace.bulk import DraftMaker, as_completed, refuse_text
from headrace.core import ClientCore
from headrace.errors import ConfigurationError


class Requests:
    """Requests that end when the test says so, and count themselves."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.cancelled: list[str] = []
        self.gates: dict[str, asyncio.Future[str]] = {}

    async def start(self, name: str) -> str:
        """Begin a request."""
        self.started.append(name)
        self.gates[name] = asyncio.get_running_loop().create_future()
        try:
            return await self.gates[name]
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise

    def end(self, name: str) -> None:
        """Let a request end."""
        self.gates[name].set_result(name)


async def settle() -> None:
    """Let everything run that can run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_results_come_in_the_order_of_completion() -> None:
    """A request that ends first is yielded first."""
    requests = Requests()
    async with aclosing(as_completed(["a", "b"], requests.start, 2)) as results:
        first = asyncio.ensure_future(anext(results))
        await settle()
        requests.end("b")
        assert await first == "b"
        requests.end("a")
        assert await anext(results) == "a"


async def test_bound_counts_results_that_were_not_taken() -> None:
    """A caller that does not come for results holds back new requests."""
    requests = Requests()
    async with aclosing(as_completed("abcd", requests.start, 2)) as results:
        first = asyncio.ensure_future(anext(results))
        await settle()
        assert requests.started == ["a", "b"]
        requests.end("a")
        requests.end("b")
        await first
        await settle()
        assert requests.started == ["a", "b", "c"]


async def test_failure_cancels_the_rest() -> None:
    """The first exception is raised, and no other request goes on."""
    requests = Requests()
    results = as_completed("abc", requests.start, 3)
    first = asyncio.ensure_future(anext(results))
    await settle()
    requests.gates["b"].set_exception(KeyError("b"))
    with pytest.raises(KeyError):
        await first
    assert sorted(requests.cancelled) == ["a", "c"]


async def test_ending_early_cancels_the_rest() -> None:
    """Closing the iteration waits until every request has been cancelled."""
    requests = Requests()
    results = as_completed("abc", requests.start, 3)
    first = asyncio.ensure_future(anext(results))
    await settle()
    requests.end("a")
    await first
    await results.aclose()
    assert sorted(requests.cancelled) == ["b", "c"]


async def test_items_may_be_asynchronous() -> None:
    """Results are yielded also while the next item is still awaited."""
    requests, more = Requests(), asyncio.Event()

    async def items() -> AsyncIterator[str]:
        yield "a"
        await more.wait()
        yield "b"

    async with aclosing(as_completed(items(), requests.start, 5)) as results:
        first = asyncio.ensure_future(anext(results))
        await settle()
        requests.end("a")
        assert await first == "a"
        more.set()
        second = asyncio.ensure_future(anext(results))
        await settle()
        requests.end("b")
        assert await second == "b"


async def test_failure_of_the_items_is_the_callers() -> None:
    """What the caller's own iterator raises comes out, after what is under way is cancelled."""
    requests = Requests()

    def items() -> Iterator[str]:
        yield "a"
        raise OSError("file is gone")

    with pytest.raises(OSError, match="file is gone"):
        async for _ in as_completed(items(), requests.start, 5):
            pass
    assert requests.cancelled in ([], requests.started)


async def test_no_items_are_no_results() -> None:
    """An empty iterable ends at once."""
    assert [result async for result in as_completed([], Requests().start, 5)] == []


def test_items_are_numbered() -> None:
    """Item i has the id <request_id>:<i>; an own id is kept, and counts."""
    maker = DraftMaker({"request_id": "run", "max_tokens": 5})
    drafts = [maker.make("a"), maker.make({"prompt": "b", "request_id": "own"}), maker.make([1])]
    assert [draft.options["request_id"] for draft in drafts] == ["run:0", "own", "run:2"]
    assert [draft.prompt for draft in drafts] == ["a", "b", [1]]


def test_own_options_go_before_shared_ones() -> None:
    """An item's options win, and leave the shared ones as they were."""
    maker = DraftMaker({"max_tokens": 5, "seed": 1})
    assert maker.make({"prompt": "a", "max_tokens": 9}).options["max_tokens"] == 9
    assert maker.make("b").options["max_tokens"] == 5


def test_runs_without_an_id_do_not_meet() -> None:
    """Two runs that are not named have different ids."""
    names = {DraftMaker({}).make("a").options["request_id"] for _ in range(10)}
    assert len(names) == 10


@pytest.mark.parametrize("prompts", ["text", b"text", {"prompt": "x"}])
def test_one_prompt_is_not_several(prompts: object) -> None:
    """A single prompt in the place of many is refused, and shown."""
    with pytest.raises(ConfigurationError, match=r"text|prompt"):
        refuse_text(prompts)


def make_core(timeout: Timeout | None) -> ClientCore:
    """Return the settings of a client that never connects."""
    return ClientCore(
        "redis://localhost",
        queue="q",
        tenant="t",
        timeout=timeout,
        result_ttl=60.0,
        max_queued=None,
        max_queued_per_tenant=None,
        max_connections=4,
    )


def test_many_requests_are_waited_for_longer_than_one() -> None:
    """The last of many may stand in the queue for longer than a lone request is allowed to."""
    core = make_core(None)
    assert core.timeout == Timeout()
    assert core.bulk_timeout.first_chunk > core.timeout.first_chunk
    assert core.bulk_timeout.between_chunks > core.timeout.between_chunks


def test_a_timeout_of_ones_own_holds_for_many_as_for_one() -> None:
    """Nothing is stretched behind the back of a caller who said how long to wait."""
    own = Timeout(first_chunk=1.0)
    assert make_core(own).bulk_timeout is own
