"""The feeder brings a claimed request to the engine, with what was emitted before.

Tokenizing blocks, so it runs on a thread, one request at a time in the order of their grants. What
cannot run is ended here with its typed "no".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from headrace.errors import EngineFailure, ErrorCode, ProtocolError, RequestError, TransportError
from headrace.protocol import ChunkMessage
from headrace_worker.backoff import redis_backoff
from headrace_worker.engine.messages import AddSequence, EngineReady, SamplingSpec
from headrace_worker.serving.capacity import Capacity
from headrace_worker.serving.intake import Intake, PreparedRequest
from headrace_worker.serving.ledger import Ledger
from headrace_worker.serving.ports import Queue
from headrace_worker.serving.reporting import Reporter
from headrace_worker.serving.request import End, InFlight, Phase


class Feeder:
    """Touched on the event loop, but for the thread that tokenizes."""

    def __init__(
        self,
        queue: Queue,
        ledger: Ledger,
        capacity: Capacity,
        reporter: Reporter,
        *,
        make_intake: Callable[[EngineReady], Intake],
        send: Callable[[AddSequence], None],
    ) -> None:
        self._queue = queue
        self._ledger = ledger
        self._capacity = capacity
        self._report = reporter
        self._make_intake = make_intake
        self._send = send
        self._intake: Intake | None = None  # from the first engine on
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="intake")

    def engine_started(self, ready: EngineReady) -> None:
        """Check requests against what this engine can take."""
        self._intake = self._make_intake(ready)

    async def feed(self, request: InFlight) -> None:
        """Prepare a claimed request and send it to the engine, or end it."""
        try:
            emitted = await self._read_emitted(request)
            prepared = await self._prepare(request, emitted)
        except RequestError as error:
            self._ledger.end(request, End.failed(error.code, error.message))
            return
        if request.phase is not Phase.CLAIMED:  # lost, released or over its deadline meanwhile
            return
        if prepared.finish_reason is not None and not prepared.needs_scores:
            request.prepared = prepared
            assert request.decided_end is not None
            self._ledger.end(request, request.decided_end)
            return
        if self._capacity.is_open:
            self._start(request, prepared)
        else:  # the engine died meanwhile, and the next one never hears of it
            await self._hand_back(request)

    def close(self) -> None:
        """Tokenize nothing any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self, request: InFlight, prepared: PreparedRequest) -> None:
        seq_id = self._ledger.start(request, prepared)
        self._capacity.sequence_sent(request.grant.cost)
        self._send(_command(seq_id, request, prepared))

    async def _hand_back(self, request: InFlight) -> None:
        with suppress(TransportError):  # then its lease runs out
            await self._ledger.release([request], strike=False)

    async def _read_emitted(self, request: InFlight) -> tuple[ChunkMessage, ...]:
        """Return what earlier epochs emitted, and note it; nobody else can write at our epoch."""
        if request.grant.num_tokens == 0:
            return ()
        try:
            emitted = await self._read_log(request)
        except ProtocolError as error:
            raise _lost(request, str(error)) from error
        num_tokens = sum(len(chunk.token_ids) for chunk in emitted)
        if num_tokens != request.grant.num_tokens:
            raise _lost(request, f"its token log holds {num_tokens}")
        self._ledger.inherit(request, emitted)
        return emitted

    async def _read_log(self, request: InFlight) -> tuple[ChunkMessage, ...]:
        backoff = redis_backoff()
        while True:
            try:
                return await self._queue.read_token_log(request.grant)
            except ProtocolError:
                raise
            except TransportError:  # it stays ours as long as its lease does
                await asyncio.sleep(backoff.next_delay_s())

    async def _prepare(
        self, request: InFlight, emitted: tuple[ChunkMessage, ...]
    ) -> PreparedRequest:
        assert self._intake is not None
        grant = request.grant
        prepare = partial(
            self._intake.prepare,
            grant.payload,
            tenant=grant.tenant,
            request_id=grant.request_id,
            emitted=emitted,
        )
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, prepare)
        except RequestError:
            raise
        except Exception as error:  # one payload that trips a library must not take its neighbours
            self._report.tripped(request, error)
            raise EngineFailure(f"preparing it raised {type(error).__name__}") from error


def _command(seq_id: int, request: InFlight, prepared: PreparedRequest) -> AddSequence:
    if prepared.finish_reason is None:
        output, sampling = prepared.output_token_ids, prepared.sampling
    else:  # the output is complete, and was another worker's: only the prompt is computed again
        wanted = prepared.sampling.prompt_logprobs
        output, sampling = (), SamplingSpec(max_tokens=1, seed=0, prompt_logprobs=wanted)
    return AddSequence(
        seq_id=seq_id,
        token_ids=prepared.prompt_token_ids + output,
        num_prompt_tokens=len(prepared.prompt_token_ids),
        sampling=sampling,
        priority=request.priority,
        salt=prepared.salt,
    )


def _lost(request: InFlight, why: str) -> RequestError:
    grant = request.grant
    message = f"{grant.num_tokens} tokens were emitted, and {why}: they are lost"
    return RequestError(message, request_id=grant.request_id, code=ErrorCode.LOST)
