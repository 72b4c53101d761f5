"""The publisher sends tokens and terminal entries to Redis: one batched emit a flush.

What Redis has not acknowledged stays in the outboxes, so a failed flush is simply repeated later.
One flush runs at a time: that is what makes "the slice under way" a single thing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.errors import TransportError
from headrace.functions import EmitItem, EmitOutcome, EmitReply
from headrace.protocol import encode_chunk
from headrace_worker.backoff import Backoff
from headrace_worker.serving.ledger import Ledger
from headrace_worker.serving.outbox import Slice
from headrace_worker.serving.ports import Queue
from headrace_worker.serving.pressure import Pressure
from headrace_worker.serving.reporting import Reporter
from headrace_worker.serving.request import CANCELLED, STOPPED_EARLY, InFlight, Phase

# Each takes a connection, and redis-py has 100, which emits and renewals share.
FINISHES_AT_A_TIME = 32


class Publisher:
    """Touched on the event loop only."""

    def __init__(
        self,
        queue: Queue,
        ledger: Ledger,
        pressure: Pressure,
        reporter: Reporter,
        *,
        company_s: float,  # tokens due within it are sent with those due now
        backoff: Backoff,
        clock: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._ledger = ledger
        self._pressure = pressure
        self._report = reporter
        self._company_s = company_s
        self._backoff = backoff
        self._clock = clock
        self._one_flush = asyncio.Lock()
        self._news = asyncio.Event()
        self._next_step_at: float | None = None  # monotonic second, as far as anybody can know

    def stepped(self, step_s: float) -> None:
        """Say that the engine has done a step; the next one probably takes as long."""
        self._next_step_at = self._clock() + step_s

    def notify(self) -> None:
        """Say that the ledger has changed."""
        self._pressure.update(self._ledger.num_unacknowledged)
        self._news.set()

    async def run(self) -> None:
        """Flush whenever something is due, until cancelled."""
        while True:
            await self._wait_until_due()
            try:
                await self.flush(until=self._clock() + self._company_s)
                self._backoff.reset()
            except TransportError:  # nothing is lost: it is all in the outboxes
                await asyncio.sleep(self._backoff.next_delay_s())

    async def flush_everything(self) -> None:
        """Send all tokens and all ends that are decided; raises TransportError."""
        while any(self._due_at(request) is not None for request in self._ledger.requests):
            await self.flush(until=float("inf"))

    async def flush(self, until: float) -> None:
        """Send what is due until a monotonic second, tokens first; raises TransportError."""
        async with self._one_flush:
            await self._emit_due(until)
            ready = [request for request in self._ledger.requests if request.is_ready_to_finish]
            outcomes = await asyncio.gather(
                *(self._ledger.finish(request) for request in ready[:FINISHES_AT_A_TIME]),
                return_exceptions=True,
            )
        self._pressure.update(self._ledger.num_unacknowledged)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _emit_due(self, until: float) -> None:
        due = [
            (request, piece)
            for request in self._ledger.requests
            if self._is_due(request, until) and (piece := request.outbox.next_slice()) is not None
        ]
        if not due:
            return
        replies = await self._queue.emit([_item(request, piece) for request, piece in due])
        for (request, _), reply in zip(due, replies, strict=True):
            if request.is_live:
                self._apply(request, reply)

    def _apply(self, request: InFlight, reply: EmitReply) -> None:
        if reply.outcome in (EmitOutcome.FENCED, EmitOutcome.DONE, EmitOutcome.GONE):
            self._ledger.drop(request, reply.outcome.value)
        elif not request.outbox.settle(reply.offset, self._clock()):
            self._ledger.drop(request, f"the log holds {reply.offset} tokens, more than we made")
        elif reply.outcome is EmitOutcome.GAP:
            self._report.rolled_back(request, reply.offset)
        elif reply.outcome is EmitOutcome.CANCEL:
            self._ledger.end(request, CANCELLED)
        elif reply.outcome is EmitOutcome.FINISH:
            self._ledger.end(request, STOPPED_EARLY)

    async def _wait_until_due(self) -> None:
        while True:
            self._news.clear()
            times = [at for r in self._ledger.requests if (at := self._due_at(r)) is not None]
            wait_s = min(times) - self._clock() if times else None
            if wait_s is not None and wait_s <= 0:
                return
            try:
                async with asyncio.timeout(wait_s):  # wait_for may lose a cancellation in 3.11
                    await self._news.wait()
            except TimeoutError:
                return

    def _due_at(self, request: InFlight) -> float | None:
        if request.phase is Phase.ENDING:
            return request.ended_at
        return request.outbox.due_at(self._next_step_at)

    def _is_due(self, request: InFlight, until: float) -> bool:
        due_at = self._due_at(request)
        return due_at is not None and due_at <= until


def _item(request: InFlight, piece: Slice) -> EmitItem:
    grant = request.grant
    return EmitItem(
        tenant=grant.tenant,
        request_id=grant.request_id,
        epoch=grant.epoch,
        offset=piece.offset,
        num_tokens=piece.num_tokens,
        entry=encode_chunk(piece.message),
    )
