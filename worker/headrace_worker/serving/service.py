"""The service: a request's life from claim to acknowledgement, on one screen.

::

    claim ─▶ feed ─▶ step ─▶ record ─▶ publish ─▶ finish
    Redis    thread   engine   ledger    Redis      Redis

Several loops share one event loop and meet in the ledger: claiming (driven by free blocks), the
supervisor's (tokens come in), the publisher's (tokens and ends go out), and the chores that the app
adds (leases, reaping, heartbeat).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from headrace.errors import ErrorCode, TransportError
from headrace.functions import Grant, Held, Wish
from headrace_worker.engine.messages import (
    EngineReady,
    SequenceFailure,
    SequenceFinish,
    SetPaused,
    SetPriority,
    StepOutcome,
)
from headrace_worker.serving.capacity import Capacity
from headrace_worker.serving.claiming import ClaimLoop
from headrace_worker.serving.feeder import Feeder
from headrace_worker.serving.ledger import Ledger
from headrace_worker.serving.metrics import Metrics
from headrace_worker.serving.ports import Queue
from headrace_worker.serving.pressure import Pressure
from headrace_worker.serving.publisher import Publisher
from headrace_worker.serving.reporting import Reporter
from headrace_worker.serving.request import (
    END_OF_WISH,
    LENGTH_REACHED,
    STOPPED,
    End,
    InFlight,
)
from headrace_worker.serving.supervisor import EngineDeath, Supervisor

LOOK_AT_DEADLINES_EVERY_S = 0.1  # of requests that wait: of those that run, at each step
FLUSH_LIMIT_S = 0.7  # of the hand-over; with the release and the engine's end it stays below 2 s
RELEASE_LIMIT_S = 0.5

_ENDS = {SequenceFinish.STOP: STOPPED, SequenceFinish.LENGTH: LENGTH_REACHED}


class Service:
    """Touched on the event loop only."""

    def __init__(
        self,
        *,
        queue: Queue,
        ledger: Ledger,
        capacity: Capacity,
        claiming: ClaimLoop,
        feeder: Feeder,
        publisher: Publisher,
        supervisor: Supervisor,
        pressure: Pressure,
        reporter: Reporter,
        metrics: Metrics,
        drain_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._ledger = ledger
        self._capacity = capacity
        self._claiming = claiming
        self._feeder = feeder
        self._publisher = publisher
        self._supervisor = supervisor
        self._pressure = pressure
        self._report = reporter
        self._metrics = metrics
        self._drain_timeout_s = drain_timeout_s
        self._clock = clock
        self._tasks: asyncio.TaskGroup | None = None  # while running
        self._feeding: set[asyncio.Task[None]] = set()

    async def run(self, ready: EngineReady, chores: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Serve until the claim loop ends: stopped, or with nothing left to do; then hand over."""
        loops = (
            self._supervisor.run(ready, self),
            self._supervisor.watch(),
            self._publisher.run(),
            self._end_overdue(),
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                running = [tasks.create_task(loop) for loop in (*loops, *chores)]
                await self._claiming.run(self.accept)
                await self._drain()
                for task in (*running, *self._feeding):
                    task.cancel()
        finally:
            await self._hand_over()

    def accept(self, grant: Grant) -> None:
        """Take a claimed request; what follows happens by itself."""
        if (request := self._ledger.claim(grant)) is not None:
            assert self._tasks is not None
            task = self._tasks.create_task(self._feed(request))
            self._feeding.add(task)
            task.add_done_callback(self._feeding.discard)

    def engine_started(self, ready: EngineReady) -> None:
        """Open for claims."""
        self._feeder.engine_started(ready)
        self._capacity.engine_started(ready)
        self._pressure.engine_started()
        self._claiming.notify()

    def engine_stepped(self, outcome: StepOutcome) -> None:
        """Enter one step into the books, and let the loops look at them."""
        self._capacity.step_done(outcome)
        for seq_id, num_cached_tokens in outcome.admitted:
            self._ledger.admitted(seq_id, num_cached_tokens)
        for seq_id in outcome.preempted:
            self._ledger.preempted(seq_id)
        for part in outcome.prompt_logprobs:  # before the end that its prompt's last token brings
            self._ledger.score_prompt(part)
        for token in outcome.tokens:
            self._ledger.record(token)
        for seq_id, why in outcome.finished:
            self._ledger.engine_finished(seq_id, _ENDS[why])
        for failure in outcome.failed:
            self._ledger.engine_finished(failure.seq_id, _failed(failure))
        self._ledger.end_overdue()
        self._report.stepped(outcome)
        self._publisher.stepped(outcome.step_s)
        self._publisher.notify()
        self._claiming.notify()

    async def engine_died(self, death: EngineDeath) -> None:
        """Tell the queue at once: who was in the batch gets a strike, nobody waits for a lease."""
        self._capacity.engine_gone()
        self._metrics.count_engine_restart()
        in_batch = [r for r in self._ledger.generating if _was_in_batch(r, death)]
        with suppress(TransportError):  # what it made before it died still counts
            await self._publisher.flush_everything()
        struck = [request for request in in_batch if request.is_generating]
        await self._release(struck, strike=True, cause=death.cause)
        await self._release(self._ledger.generating, strike=False)
        with suppress(TransportError):
            await self._tell_dead_letters(struck)

    def heed(self, wish: Wish) -> None:
        """Do what a client wants of a request, if it is still here."""
        if (request := self._ledger.holding(wish.held)) is None:
            return
        if wish.end is not None:
            self._ledger.end(request, END_OF_WISH[wish.end])
            self._publisher.notify()
        elif wish.priority != request.priority:
            request.priority = wish.priority
            if request.is_generating and request.seq_id is not None:
                self._supervisor.send(SetPriority(request.seq_id, wish.priority))

    def lost(self, held: Held) -> None:
        """Drop a request whose lease is gone."""
        self._ledger.lease_lost(held)
        self._publisher.notify()

    async def _tell_dead_letters(self, struck: Sequence[InFlight]) -> None:
        for request in struck if len(struck) == 1 else ():  # only one that ran alone can be
            status = await self._queue.status(request.held)
            if status is not None and status.error_code == ErrorCode.DEAD_LETTERED:
                self._report.dead_lettered(request)

    async def _feed(self, request: InFlight) -> None:
        await self._feeder.feed(request)
        self._publisher.notify()

    async def _end_overdue(self) -> None:
        while True:
            await self._ledger.wait_until_filled()  # an idle worker sleeps
            await asyncio.sleep(LOOK_AT_DEADLINES_EVERY_S)
            if self._ledger.end_overdue():
                self._publisher.notify()

    async def _drain(self) -> None:
        """Let requests finish within the drain time; by default there is none."""
        self._report.draining(len(self._ledger))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout_s):
                await self._ledger.wait_until_empty()

    async def _hand_over(self) -> None:
        """Emit what is there, give the rest back, stop the engine; whatever fails, in time."""
        self._supervisor.send(SetPaused(True))
        with suppress(TransportError, TimeoutError):
            async with asyncio.timeout(FLUSH_LIMIT_S):
                await self._publisher.flush_everything()
        with suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_LIMIT_S):
                await self._release(self._ledger.requests, strike=False)
        self._feeder.close()
        await self._supervisor.stop()

    async def _release(
        self, requests: Sequence[InFlight], *, strike: bool, cause: str = ""
    ) -> None:
        with suppress(TransportError):  # then their leases run out
            await self._ledger.release(requests, strike=strike, cause=cause)


def _was_in_batch(request: InFlight, death: EngineDeath) -> bool:
    """Say whether it may be to blame; when the engine could not say, all but the bystanders.

    That has those in it that it had only just heard of: to take one in may have killed it.
    """
    if request.seq_id is None:
        return False
    if death.seq_ids is None:
        return request.seq_id not in death.bystanders
    return request.seq_id in death.seq_ids


def _failed(failure: SequenceFailure) -> End:
    return End.failed(ErrorCode(failure.code), failure.message)
