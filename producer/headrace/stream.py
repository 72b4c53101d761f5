"""TokenStream: one request's chunks as they come, resumable, never silent for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from types import TracebackType

from headrace.assembly import LogAssembly, Opened
from headrace.calls import status
from headrace.errors import ConfigurationError, StreamConsumed, StreamUnfinished, TransportError
from headrace.link import AsyncLink
from headrace.multiplexer import FULL_INBOX, Inbox
from headrace.patience import Patience, explain_silence
from headrace.types import Chunk, Completion, Timeout

PROBE_S = 1.0
"""Longest time that questions to Redis may add to a timeout, however many answers are awaited."""


class TokenStream:
    """Chunks of one request, to be used once: ``async with`` around ``async for``.

    Leaving early cancels the request, unless ``cancel_on_exit`` is False. Iterating raises a
    RequestTimeout when one of the timeouts is over, a RequestError when the answer is "no", and
    TransportError when Redis refuses to be read; an outage of Redis is waited out.
    """

    def __init__(
        self,
        link: AsyncLink,
        opening: Callable[[], Awaitable[Opened]],
        *,
        request_id: str,
        tenant: str,
        timeout: Timeout,
        cancel_on_exit: bool,
    ) -> None:
        self.request_id = request_id
        self._link = link
        self._opening = opening
        self._tenant = tenant
        self._timeout = timeout
        self._cancel_on_exit = cancel_on_exit
        self._is_consumed = False
        self._inbox: Inbox | None = None  # None until it is opened
        self._patience = Patience(timeout, request_id, time.monotonic())

    @property
    def completion(self) -> Completion:
        """The result; raises StreamUnfinished before the end, and a RequestError at a "no"."""
        if self._inbox is None:
            raise StreamUnfinished(f"the stream of request {self.request_id!r} was not opened")
        return self._inbox.assembly.completion()

    async def read(self) -> Completion:
        """Read to the end and return the result; raises what iterating raises."""
        async for _ in self:
            pass
        return self.completion

    async def cancel(self) -> None:
        """Cancel the request; the stream then ends with RequestCancelled."""
        for log in self._opened.assembly.unfinished:
            await self._link.cancel(self._tenant, log.request_id)

    async def __aenter__(self) -> TokenStream:
        self._patience = Patience(self._timeout, self.request_id, time.monotonic())
        opened = await self._opening()
        if opened.is_doubtful:
            self._patience.doubt()
        self._inbox = Inbox(opened.assembly)
        self._link.multiplexer.add(self._inbox)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        inbox = self._opened
        self._link.multiplexer.remove(inbox)
        if self._cancel_on_exit and inbox.assembly.unfinished:
            ids = [log.request_id for log in inbox.assembly.unfinished]
            await self._link.cancel_quietly(self._tenant, ids)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        if self._is_consumed:
            raise StreamConsumed(f"the stream of request {self.request_id!r} was iterated before")
        self._is_consumed = True
        return self._chunks(self._opened)

    async def _chunks(self, inbox: Inbox) -> AsyncIterator[Chunk]:
        while (chunk := await self._next(inbox)) is not None:
            yield chunk

    async def _next(self, inbox: Inbox) -> Chunk | None:
        """Wait for the next chunk; None after the last one."""
        now_s = time.monotonic()
        self._patience.wait_begins(now_s)
        if not inbox.assembly.is_finished:
            self._patience.refuse_overtime(now_s)
        while True:
            if (chunk := self._take(inbox)) is not None:
                return chunk
            if inbox.assembly.is_finished:
                inbox.assembly.completion()  # raises the request's own error
                return None
            if inbox.failure is not None:
                raise inbox.failure
            await inbox.wait(self._patience.wait_s(time.monotonic()))
            await self._attend(inbox)

    @property
    def _opened(self) -> Inbox:
        if self._inbox is None:
            raise ConfigurationError("open the stream first: async with client.stream(…) as stream")
        return self._inbox

    def _take(self, inbox: Inbox) -> Chunk | None:
        was_full = inbox.assembly.num_ready == FULL_INBOX // 2
        if (chunk := inbox.assembly.take()) is None:
            return None
        self._patience.heard(time.monotonic())
        if was_full:
            self._link.multiplexer.resume(inbox)
        return chunk

    async def _attend(self, inbox: Inbox) -> None:
        """Look after the clocks: ask what became of a silent request, give up when it is time."""
        if inbox.is_disturbed:
            inbox.is_disturbed = False
            self._patience.doubt()
        if inbox.assembly.num_ready or inbox.assembly.is_finished:
            return
        now_s = time.monotonic()
        verdict = self._patience.verdict(now_s)
        if verdict is None and not self._patience.is_probe_due(now_s):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(PROBE_S):
                for log in inbox.assembly.unfinished:
                    await self._probe(inbox, log)
        if verdict is not None and not inbox.assembly.num_ready:
            raise verdict

    async def _probe(self, inbox: Inbox, log: LogAssembly) -> None:
        """Ask for the status, then read the log once more; raises what explains the silence."""
        try:
            call = status(self._link.keys, tenant=self._tenant, request_id=log.request_id)
            known = await self._link.call_once(call)
            entries = await self._link.read(log)
        except TransportError as error:
            if not error.retryable_later:
                raise
            return
        if entries:
            inbox.feed(log, entries)
        elif not log.is_finished and (reason := explain_silence(known, log)) is not None:
            raise reason
