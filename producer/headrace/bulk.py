"""Many requests at a time: a bounded number in flight, results as they come."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
)
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.errors import ConfigurationError
from headrace.options import PromptWithOptions
from headrace.types import Prompt

T = TypeVar("T")

Item = Prompt | PromptWithOptions
"""One prompt of many: text, token ids, or a map with ``prompt`` or ``messages`` and options."""


@dataclass(frozen=True, slots=True)
class Draft:
    """One item with all its options."""

    prompt: Any  # not checked yet
    options: dict[str, Any]  # not checked yet; request_id is set


class DraftMaker:
    """Gives item number i the id ``<request_id>:<i>`` and the options that all items share."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._run_id = self._options.pop("request_id", None) or uuid.uuid4().hex
        self._num_made = 0

    def make(self, item: Item) -> Draft:
        """Return the next draft; an item's own options win over those that are shared."""
        options = {**self._options, "request_id": f"{self._run_id}:{self._num_made}"}
        self._num_made += 1
        if not isinstance(item, Mapping):
            return Draft(item, options)
        options.update(item)
        return Draft(options.pop("prompt", None), options)


def refuse_text(prompts: object) -> None:
    """Raise ConfigurationError for a single prompt, whose characters are not meant as prompts."""
    if isinstance(prompts, str | bytes | Mapping):
        raise ConfigurationError(f"prompts must be several prompts, not one: {prompts!r:.80}")


async def each(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    """Iterate over either kind of iterable."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end; a second cancellation would cut short their goodbye."""
    leftover = list(tasks)
    for task in leftover:
        if not task.cancelling():
            task.cancel()
    await asyncio.gather(*leftover, return_exceptions=True)


async def as_completed(
    items: Iterable[Item] | AsyncIterable[Item],
    start: Callable[[Item], Coroutine[Any, Any, T]],
    max_in_flight: int,
) -> AsyncGenerator[T, None]:
    """Yield what ``start`` returns for each item, as they finish; raises what it raises first.

    An item counts as in flight until its result is taken, so a slow caller holds back the rest.
    Ending the iteration early cancels what is in flight.
    """
    finished: asyncio.Queue[asyncio.Task[T] | None] = asyncio.Queue()  # None: no more items
    in_flight = asyncio.Semaphore(max_in_flight)
    running: set[asyncio.Task[T]] = set()

    async def feed() -> None:
        try:
            async for item in each(items):
                await in_flight.acquire()
                task = asyncio.create_task(start(item))
                running.add(task)
                task.add_done_callback(finished.put_nowait)
        finally:
            finished.put_nowait(None)

    feeder = asyncio.create_task(feed(), name="headrace-feed")
    try:
        has_more = True
        while has_more or running:
            task = await finished.get()
            if task is None:
                has_more = False
                await feeder  # raises what the caller's iterable raised
                continue
            running.discard(task)
            in_flight.release()
            yield task.result()
    finally:
        await end_tasks([feeder, *running])
