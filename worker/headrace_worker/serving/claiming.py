"""The claim loop: asks for as much as there is room for, and sleeps when there is nothing to get.

It wakes up when the queue has news, when room has grown beyond what was last refused, or when it is
told to stop. A claim that is under way at that moment is still awaited for a little, because its
grants would otherwise wait for their leases to run out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from headrace.errors import TransportError
from headrace.functions import Grant
from headrace_worker.backoff import Backoff
from headrace_worker.serving.ports import Queue, Room

POLL_S = 2.0  # an idle worker asks again after this, should a wake-up be lost
EMPTY_POLL_S = 0.2  # the same for one that is to leave when the queue is empty
FULL_POLL_S = 0.1  # a full worker asks no more often, whatever the news
LAST_CLAIM_S = 0.5  # how long an answer is awaited after the stop


class ClaimLoop:
    """Touched on the event loop only."""

    def __init__(
        self,
        queue: Queue,
        *,
        room: Callable[[], Room | None],
        is_idle: Callable[[], bool],  # nothing is in flight here
        exit_when_empty: bool,
        backoff: Backoff,
    ) -> None:
        self._queue = queue
        self._room = room
        self._is_idle = is_idle
        self._exit_when_empty = exit_when_empty
        self._backoff = backoff
        self._changed = asyncio.Event()
        self._stopped = asyncio.Event()
        # The blocking read, kept from turn to turn.
        self._wake: asyncio.Task[TransportError | None] | None = None
        self._asked_at = 0.0  # second of the event loop's clock at the last claim

    def notify(self) -> None:
        """Say that room may have grown, or that the last request has left."""
        self._changed.set()

    def stop(self) -> None:
        """Claim nothing from now on."""
        self._stopped.set()
        self._changed.set()

    async def run(self, accept: Callable[[Grant], None]) -> None:
        """Claim until stopped or, if so asked, until the queue is empty."""
        turns = asyncio.create_task(self._take_turns(accept))
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait({turns, stopped}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({turns}, timeout=LAST_CLAIM_S)
            if turns.done():
                turns.result()
        finally:
            for task in (turns, stopped, self._wake):
                if task is not None:
                    task.cancel()

    async def _take_turns(self, accept: Callable[[Grant], None]) -> None:
        while not self._stopped.is_set():
            try:
                if await self._take_turn(accept):
                    return
                self._backoff.reset()
            except TransportError:  # logged by the link; the grants, if any, are asked for again
                await self._sleep(self._backoff.next_delay_s())

    async def _take_turn(self, accept: Callable[[Grant], None]) -> bool:
        """Claim once, and wait where that brings nothing; return whether all work is done."""
        self._changed.clear()
        room = self._room()
        if room is None:
            await self._changed.wait()
            return False
        self._asked_at = asyncio.get_running_loop().time()
        reply = await self._queue.claim(room)
        for grant in reply.grants:
            accept(grant)
        if reply.grants:
            return False
        if self._exit_when_empty and await self._is_all_done():
            return True
        await self._wait_for_news(reply.wake_cursor, refused=room)
        return False

    async def _is_all_done(self) -> bool:
        if not self._is_idle():
            return False
        depth = await self._queue.depth()
        return depth.queued == 0 and depth.running == 0

    async def _wait_for_news(self, cursor: str, refused: Room) -> None:
        was_idle = self._is_idle()
        if self._wake is None or self._wake.done():
            poll_s = EMPTY_POLL_S if self._exit_when_empty and was_idle else POLL_S
            self._wake = asyncio.create_task(self._sleep_on_queue(cursor, poll_s))
            self._wake.add_done_callback(lambda _: self._changed.set())
        while not (self._wake.done() or self._stopped.is_set()):
            if self._has_grown(refused) or (self._is_idle() and not was_idle):
                return
            await self._changed.wait()  # each step comes by here, so no task of its own
            self._changed.clear()
        if self._wake.done() and (error := self._wake.result()) is not None:
            raise error
        if refused.is_full:
            await self._rest_while_full(refused)

    async def _rest_while_full(self, refused: Room) -> None:
        """News come with every request, and hardly any of them is one to give way to."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._asked_at + FULL_POLL_S):
                while not (self._stopped.is_set() or self._has_grown(refused)):
                    await self._changed.wait()
                    self._changed.clear()

    async def _sleep_on_queue(self, cursor: str, timeout_s: float) -> TransportError | None:
        """Return the error instead of raising it: nobody may be waiting for it any more."""
        try:
            await self._queue.wait_for_work(cursor, timeout_s)
        except TransportError as error:
            return error
        return None

    def _has_grown(self, refused: Room) -> bool:
        room = self._room()
        return room is not None and room.exceeds(refused)

    async def _sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
