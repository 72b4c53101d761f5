"""Clients of a chaos run: a calm and a restless reader for each request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise

from headrace import AsyncClient, Chunk, Completion, Timeout
from headrace.errors import HeadraceError, TransportError
from headrace.options import RequestOptions
from headrace.stream import TokenStream
from support.chaos_history import History
from support.streams import Asked

PATIENT = Timeout(first_chunk=600, between_chunks=300, total=3600, redis=30)
IN_TRANSIT_S = 0.5
MOST_CHUNKS = 6  # that the restless reader takes before it leaves


@dataclass(slots=True)
class View:
    """What one reader saw of one request."""

    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)  # one a chunk, since the run's start
    wrong: list[str] = field(default_factory=list)  # chunks at an offset that was not due
    num_leaves: int = 0  # times the reader left early
    end: Completion | None = None
    error: str = ""  # how reading ended, when it was not by the terminal entry

    def take(self, chunk: Chunk, now_s: float) -> None:
        """Add a chunk."""
        if chunk.index != len(self.tokens):
            self.wrong.append(f"a chunk at {chunk.index}, and {len(self.tokens)} was due")
        self.tokens += chunk.token_ids
        self.times_s.append(now_s)

    def silence_s(self, at_s: float) -> float | None:
        """Return the longest silence that began about then; None when it was not in mid-stream.

        What was under way at that moment still arrives, so the silence may begin a little later.
        """
        pairs = list(pairwise(self.times_s))
        return max((b - a for a, b in pairs if b > at_s > a - IN_TRANSIT_S), default=None)


class Clients:
    """Owned by one event loop; other threads may look at its numbers."""

    def __init__(self, client: AsyncClient, history: History, seed: int) -> None:
        self.calm: dict[str, View] = {}  # by request id
        self.restless: dict[str, View] = {}
        self.num_tokens = 0  # that calm readers saw
        self.num_done = 0  # requests that are over, as far as their clients know
        self._client = client
        self._history = history
        self._draw = random.Random(seed)

    async def run(self, asked: Sequence[Asked], in_flight: int, *, is_read: bool = True) -> None:
        """Enqueue all, so many at a time, and read each until its end."""
        gate = asyncio.Semaphore(in_flight)
        async with asyncio.TaskGroup() as group:
            for request in asked:
                await gate.acquire()
                group.create_task(self._follow(request, gate, is_read))

    async def read_all(self, asked: Sequence[Asked]) -> None:
        """Read requests that were enqueued before, from their start."""
        for request in asked:
            stream = self._client.attach(request.request_id, timeout=PATIENT)
            async with stream:
                await asyncio.gather(self._read(request, stream), self._read_restlessly(request))

    async def submit_all(self, asked: Sequence[Asked]) -> None:
        """Enqueue one after another; the history has what came of it."""
        for request in asked:
            await self._submit(request)

    async def _follow(self, request: Asked, gate: asyncio.Semaphore, is_read: bool) -> None:
        try:
            if is_read:
                await self._ask_and_read(request)
            else:
                await self._submit(request)
        finally:
            self.num_done += 1
            gate.release()

    async def _submit(self, request: Asked) -> None:
        with suppress(HeadraceError):  # the history has it
            with self._history.operation("enqueue", request.request_id):
                await self._client.submit(list(request.prompt), **options_of(request))

    async def _ask_and_read(self, request: Asked) -> None:
        stream = self._client.stream(
            list(request.prompt), timeout=PATIENT, cancel_on_exit=False, **options_of(request)
        )
        async with AsyncExitStack() as stack:
            try:
                with self._history.operation("enqueue", request.request_id):
                    await stack.enter_async_context(stream)
            except HeadraceError:
                return
            async with asyncio.TaskGroup() as readers:
                readers.create_task(self._read(request, stream))
                readers.create_task(self._read_restlessly(request))

    async def _read(self, request: Asked, stream: TokenStream) -> None:
        view = self.calm[request.request_id] = View()
        try:
            with self._history.operation("read", request.request_id):
                async for chunk in stream:
                    view.take(chunk, self._history.now_s)
                    self.num_tokens += len(chunk.token_ids)
                view.end = stream.completion
        except HeadraceError as error:
            view.error = repr(error)

    async def _read_restlessly(self, request: Asked) -> None:
        view = self.restless[request.request_id] = View()
        while view.end is None and not view.error:
            try:
                with self._history.operation("attach", request.request_id):
                    await self._read_a_little(request.request_id, view)
            except TransportError:  # it could not attach; it tries again
                continue
            except HeadraceError as error:
                view.error = repr(error)

    async def _read_a_little(self, request_id: str, view: View) -> None:
        left = self._draw.randint(1, MOST_CHUNKS)
        after = len(view.tokens)
        async with self._client.attach(request_id, after=after, timeout=PATIENT) as stream:
            async for chunk in stream:
                view.take(chunk, self._history.now_s)
                left -= 1
                if not left:
                    view.num_leaves += 1
                    return
        view.end = stream.completion


def options_of(request: Asked) -> RequestOptions:
    """Return the keyword arguments that ask for it."""
    return {
        "request_id": request.request_id,
        "max_tokens": request.max_tokens,
        "seed": request.seed,
        "ignore_eos": True,
        "priority": request.priority,
    }
