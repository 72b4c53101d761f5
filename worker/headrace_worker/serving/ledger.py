"""The ledger: every request in flight, and the only place that finishes one.

A request enters with its grant and leaves exactly once: finished (the queue took its terminal
entry), dropped (the queue says that it is no longer ours), or released (handed back for another
worker). Whatever moves it out of the engine's hands aborts its sequence at once, so its blocks are
free in the next step. Touched on the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from headrace.functions import FinishOutcome, Grant, Held
from headrace.protocol import ChunkMessage, TerminalMessage
from headrace.types import RequestState, TokenLogprob
from headrace_worker.engine.messages import PromptLogprobs, SampledToken
from headrace_worker.serving.intake import PreparedRequest
from headrace_worker.serving.outbox import EmitPolicy, Outbox
from headrace_worker.serving.ports import Queue
from headrace_worker.serving.reporting import Reporter
from headrace_worker.serving.request import (
    DEADLINE_PASSED,
    SCORES_MISSING,
    STOPPED,
    End,
    InFlight,
    Phase,
)


class Ledger:
    """The books of one worker."""

    def __init__(
        self,
        queue: Queue,
        *,
        worker_id: str,
        emit_policy: EmitPolicy,
        reporter: Reporter,
        clock: Callable[[], float],
        abort: Callable[[int], None],
        on_left: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._worker_id = worker_id
        self._emit_policy = emit_policy
        self._report = reporter
        self._clock = clock
        self._abort = abort  # tells the engine to drop a sequence
        self._on_left = on_left  # called whenever a request has left
        self._requests: dict[tuple[str, str], InFlight] = {}  # by tenant and request id
        self._in_engine: dict[int, InFlight] = {}  # by seq_id, until either side is done with it
        self._num_sequences = 0
        self._entered = asyncio.Event()
        self._left = asyncio.Event()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> list[InFlight]:
        """All that is ours right now."""
        return list(self._requests.values())

    @property
    def generating(self) -> list[InFlight]:
        """Of these, all whose end is still open."""
        return [request for request in self._requests.values() if request.is_generating]

    def find(self, tenant: str, request_id: str) -> InFlight | None:
        """Return a request that is ours."""
        return self._requests.get((tenant, request_id))

    def holding(self, held: Held) -> InFlight | None:
        """Return the request of this very grant, if it is still ours."""
        request = self.find(held.tenant, held.request_id)
        return request if request is not None and request.held == held else None

    @property
    def num_unacknowledged(self) -> int:
        """Tokens that exist only in this process."""
        return sum([request.outbox.num_unacknowledged for request in self._requests.values()])

    def claim(self, grant: Grant) -> InFlight | None:
        """Enter a grant; None for one that is here already, told again after a lost reply."""
        if (earlier := self._requests.get((grant.tenant, grant.request_id))) is not None:
            if earlier.grant.epoch >= grant.epoch:
                return None
            self.drop(earlier, "granted again")
        outbox = Outbox(self._emit_policy, attached=grant.attached)
        request = InFlight(grant, outbox, claimed_at=self._clock())
        self._requests[request.key] = request
        self._entered.set()
        self._report.received(request)
        return request

    def inherit(self, request: InFlight, emitted: Iterable[ChunkMessage]) -> None:
        """Note what earlier epochs emitted, before anything else happens to the request."""
        attached = request.grant.attached
        request.outbox = Outbox(self._emit_policy, attached=attached, emitted=emitted)

    def start(self, request: InFlight, prepared: PreparedRequest) -> int:
        """Give a prepared request its sequence id, under which the engine will speak of it."""
        request.move_to(Phase.WAITING)
        request.prepared = prepared
        self._num_sequences += 1
        request.seq_id = self._num_sequences
        self._in_engine[request.seq_id] = request
        return request.seq_id

    def admitted(self, seq_id: int, num_cached_tokens: int) -> None:
        """The engine has begun with it."""
        if (request := self._in_engine.get(seq_id)) is None:
            return
        request.move_to(Phase.RUNNING)
        request.admitted_at = self._clock()
        request.num_cached_tokens = num_cached_tokens
        self._report.admitted(request)

    def preempted(self, seq_id: int) -> None:
        """The engine ran out of blocks and will compute it again."""
        if (request := self._in_engine.get(seq_id)) is not None:
            request.num_preemptions += 1
            self._report.preempted(request)

    def score_prompt(self, part: PromptLogprobs) -> None:
        """Take the logprobs of the next tokens of a prompt."""
        if (request := self._in_engine.get(part.seq_id)) is not None:
            request.prompt_scores.add(part)

    def record(self, token: SampledToken) -> None:
        """Take the next token; it may complete a stop string, which ends the request."""
        if (request := self._in_engine.get(token.seq_id)) is None:
            return
        if request.decided_end is not None:  # it runs for its prompt's logprobs alone
            return
        assert request.prepared is not None
        request.last_token_at = now = self._clock()
        piece = request.prepared.detokenizer.append(token.token_id)
        request.outbox.append(token.token_id, piece.text, now, _logprob(token))
        if request.first_token_at is None:
            request.first_token_at = now
            self._report.first_token(request)
        if piece.stopped:
            self.end(request, STOPPED)

    def end(self, request: InFlight, end: End) -> None:
        """Decide how a request ends; the first decision stands."""
        if not request.is_generating:
            return
        self._take_from_engine(request)
        request.move_to(Phase.ENDING)
        is_short = request.wants_prompt_logprobs and request.prompt_logprobs is None
        is_whole = end.state is RequestState.FINISHED and not end.is_early
        request.end = SCORES_MISSING if is_short and is_whole else end
        request.ended_at = self._clock()
        # A "no" before the first token has no text, so nobody reads an echo for an answer.
        is_said = request.end.state is RequestState.FINISHED or request.num_output_tokens > 0
        if request.prepared is not None and is_said:
            request.tail = request.prepared.detokenizer.finish()

    def end_overdue(self) -> bool:
        """End what is past its deadline with what there is; return whether anything was."""
        now = self._clock()
        overdue = [
            request
            for request in self._requests.values()
            if request.grant.deadline_ms is not None and request.is_overdue(now)
        ]
        for request in overdue:
            self.end(request, DEADLINE_PASSED)
        return bool(overdue)

    def engine_finished(self, seq_id: int, end: End) -> None:
        """The engine is done with a sequence, by itself."""
        if (request := self._in_engine.pop(seq_id, None)) is not None:
            is_good = end.state is RequestState.FINISHED
            self.end(request, (request.decided_end if is_good else None) or end)

    async def finish(self, request: InFlight) -> None:
        """Publish the terminal entry of a request that is ready to finish, and acknowledge it.

        The queue does both in one atomic step. Raises TransportError; then it is simply done again.
        """
        assert request.is_ready_to_finish
        assert request.end is not None
        reply = await self._queue.finish(
            request.held, request.num_output_tokens, request.end.state, self._terminal(request)
        )
        if not request.is_live:
            return
        match reply.outcome:
            case FinishOutcome.OK:
                self._close(request, Phase.FINISHED)
                self._report.finished(request)
            case FinishOutcome.GAP if request.outbox.settle(reply.offset, self._clock()):
                self._report.rolled_back(request, reply.offset)
            case outcome:
                self.drop(request, outcome.value)

    def drop(self, request: InFlight, why: str) -> None:
        """Forget a request that is no longer ours; nothing of it may be written any more."""
        self._close(request, Phase.DROPPED)
        self._report.dropped(request, why)

    def lease_lost(self, held: Held) -> None:
        """Drop a request whose lease is gone; one that is ending hears it in the queue's answer.

        The queue forgets a lease with the finish, and a renewal may tell us so first.
        """
        request = self.holding(held)
        if request is not None and request.is_generating:
            self.drop(request, "lease lost")

    async def release(self, requests: Sequence[InFlight], *, strike: bool, cause: str = "") -> None:
        """Hand requests back; those that the queue cannot be told about come back by their leases.

        Raises TransportError after the books are closed: their sequences are gone either way.
        """
        for request in requests:
            self._close(request, Phase.RELEASED)
        if requests:
            held = [request.held for request in requests]
            await self._queue.release(held, strike=strike, cause=cause)

    async def wait_until_filled(self) -> None:
        """Return when something is in flight."""
        while not self._requests:
            self._entered.clear()
            await self._entered.wait()

    async def wait_until_empty(self) -> None:
        """Return when nothing is in flight."""
        while self._requests:
            self._left.clear()
            await self._left.wait()

    def check_integrity(self) -> None:
        """Raise AssertionError unless both indexes hold the same live requests."""
        assert all(request.is_live for request in self._requests.values())
        for seq_id, request in self._in_engine.items():
            assert request.seq_id == seq_id
            assert request.is_generating
            assert self._requests[request.key] is request

    def _close(self, request: InFlight, phase: Phase) -> None:
        self._take_from_engine(request)
        request.move_to(phase)
        if self._requests.get(request.key) is request:
            del self._requests[request.key]
        self._left.set()
        self._on_left()

    def _take_from_engine(self, request: InFlight) -> None:
        if request.seq_id in self._in_engine:
            del self._in_engine[request.seq_id]
            self._abort(request.seq_id)

    def _terminal(self, request: InFlight) -> TerminalMessage:
        assert request.end is not None
        is_good = request.end.state is RequestState.FINISHED
        return TerminalMessage(
            finish_reason=request.end.reason,
            text=request.tail,
            usage=request.usage,
            timings=request.timings(),
            error_code=request.end.code,
            error_message=request.end.message,
            worker_id=self._worker_id,
            prompt_logprobs=request.prompt_logprobs if is_good else None,
        )


def _logprob(token: SampledToken) -> TokenLogprob | None:
    if token.logprob is None:
        return None
    return TokenLogprob(token.token_id, token.logprob, token.top_logprobs)
