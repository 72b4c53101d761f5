"""What clients want of the requests that run here: a hint makes the worker look, Redis says what.

A hint is only the name of a request, on a channel that may lose it. So nothing is done for a hint
alone, and all that is held here is looked at once a second whether there was one or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from redis.asyncio import Redis

from headrace.errors import TransportError
from headrace.functions import REDIS_FAILURES, Held, Wish
from headrace.keys import Keys
from headrace_worker.backoff import Backoff

LISTEN_S = 2.0  # longest single wait for a message
LOOK_EVERY_S = 1.0
FIRST_RETRY_S, MOST_RETRY_S = 0.1, 2.0


class Wishes(Protocol):
    """Who knows what is wanted."""

    def wishes(self, held: Sequence[Held]) -> AsyncIterator[Wish]:
        """Yield what clients want of those that are ours; raises TransportError."""
        ...


class ControlListener:
    """Subscribes to the control channel and asks the queue; touched on the event loop only."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        queue: Wishes,
        *,
        held: Callable[[], Sequence[Held]],
        on_wish: Callable[[Wish], None],
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._queue = queue
        self._held = held
        self._on_wish = on_wish  # told again and again of a wish that was not met

    async def run(self) -> None:
        """Listen until cancelled; subscribes again after a failure."""
        backoff = Backoff(FIRST_RETRY_S, MOST_RETRY_S)
        while True:
            try:
                await self._listen(backoff)
            except REDIS_FAILURES:  # the link tells; hints are only hints
                await asyncio.sleep(backoff.next_delay_s())

    async def look_at_all(self) -> None:
        """Ask what is wanted of all that is held; raises TransportError."""
        await self._ask(self._held())

    async def _ask(self, held: Sequence[Held]) -> None:
        if held:
            async for wish in self._queue.wishes(held):  # met before others are asked for
                self._on_wish(wish)

    async def _listen(self, backoff: Backoff) -> None:
        async with self._redis.pubsub(ignore_subscribe_messages=True) as channel:
            await channel.subscribe(self._keys.control)
            backoff.reset()
            while True:
                message = await channel.get_message(timeout=LISTEN_S)
                if message is not None:
                    with suppress(TransportError):  # logged by the link; the next look comes soon
                        await self._ask(self._hinted(message["data"]))

    def _hinted(self, data: bytes) -> list[Held]:
        tenant, _, request_id = data.decode("utf-8", "replace").partition(":")
        return [h for h in self._held() if (h.tenant, h.request_id) == (tenant, request_id)]
