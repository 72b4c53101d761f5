"""The queue as one worker sees it: each method is one idempotent function, or one read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from redis.asyncio import Redis

from headrace import functions
from headrace.errors import ProtocolError, TransportError
from headrace.functions import (
    ClaimReply,
    EmitItem,
    EmitReply,
    FinishReply,
    Grant,
    Held,
    QueueDepth,
    Wish,
)
from headrace.keys import Keys
from headrace.protocol import (
    CHUNK_FIELD,
    ChunkMessage,
    TerminalMessage,
    decode_chunk,
    encode_terminal,
)
from headrace.types import RequestState, RequestStatus
from headrace_worker.transport.claim import Claimer
from headrace_worker.transport.link import Link

ENTRIES_A_PAGE = 256
HELD_A_CALL = 64  # requests that Redis looks at before others have their turn
MAX_LOG_BYTES = 128 * 1024 * 1024
"""Bytes of a token log that are taken up; a whole context with logprobs has less."""


class RoomIfDisplaced(Protocol):
    """What requests of sooner priority find if those of this one and later ones give way."""

    @property
    def priority(self) -> int:
        """From 0 to 9."""
        ...

    @property
    def free_seqs(self) -> int:
        """Sequences."""
        ...

    @property
    def free_tokens(self) -> int:
        """KV slots."""
        ...


class Room(Protocol):
    """What a worker can take right now."""

    @property
    def free_seqs(self) -> int:
        """Sequences."""
        ...

    @property
    def free_tokens(self) -> int:
        """KV slots."""
        ...

    @property
    def total_tokens(self) -> int:
        """KV slots of the whole cache."""
        ...

    @property
    def if_displaced(self) -> Sequence[RoomIfDisplaced]:
        """One for each priority that runs here, soonest first."""
        ...


class RedisQueue:
    """Every method raises TransportError when Redis cannot or will not; all may be repeated."""

    def __init__(
        self,
        link: Link,
        blocking: Redis,  # for reads that wait
        keys: Keys,
        *,
        worker_id: str,
        lease_s: float,
        max_strikes: int,
    ) -> None:
        self._link = link
        self._blocking = blocking
        self._keys = keys
        self._worker_id = worker_id
        self._lease_ms = round(lease_s * 1000)
        self._max_strikes = max_strikes
        self._claimer = Claimer(
            link, keys, worker_id=worker_id, lease_ms=self._lease_ms, max_strikes=max_strikes
        )

    async def claim(self, room: Room) -> ClaimReply:
        """Take what fits; after a failure the next call asks for the same grants again."""
        return await self._claimer.claim(
            free_seqs=room.free_seqs,
            free_tokens=room.free_tokens,
            total_tokens=room.total_tokens,
            if_displaced=[
                (left.priority, left.free_seqs, left.free_tokens) for left in room.if_displaced
            ],
        )

    async def wait_for_work(self, cursor: str, timeout_s: float) -> None:
        """Sleep until the wake stream has an entry after the cursor, or the time is over."""
        try:
            async with asyncio.timeout(timeout_s + self._link.timeout_s):
                await self._blocking.xread({self._keys.wake: cursor}, block=round(timeout_s * 1000))
        except functions.REDIS_FAILURES as error:
            raise self._lost("wait", error) from error
        self._link.found("wait")

    async def read_token_log(self, grant: Grant) -> tuple[ChunkMessage, ...]:
        """Return what earlier epochs emitted; raises ProtocolError for a log that is unreadable."""
        name = self._keys.token_log(grant.tenant, grant.request_id)
        chunks: list[ChunkMessage] = []
        start, num_bytes = "-", 0
        while True:
            entries = await self._read_page(name, start)
            for entry_id, fields in entries:
                if CHUNK_FIELD not in fields:
                    raise ProtocolError(f"entry {entry_id.decode()} of the token log is no chunk")
                num_bytes += len(fields[CHUNK_FIELD])
                if num_bytes > MAX_LOG_BYTES:
                    raise ProtocolError(f"the token log has more than {MAX_LOG_BYTES} bytes")
                chunks.append(decode_chunk(fields[CHUNK_FIELD]))
            if len(entries) < ENTRIES_A_PAGE:
                return tuple(chunks)
            start = f"({entries[-1][0].decode()}"  # behind the last one

    async def _read_page(self, name: str, start: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        try:
            async with asyncio.timeout(self._link.timeout_s):
                entries: Any = await self._link.redis.xrange(name, start, count=ENTRIES_A_PAGE)
        except functions.REDIS_FAILURES as error:
            raise self._lost("read", error) from error
        self._link.found("read")
        return list(entries)

    async def emit(self, items: Sequence[EmitItem]) -> tuple[EmitReply, ...]:
        """Append to token logs, one item a request."""
        return await self._link.run(
            functions.emit(self._keys, worker_id=self._worker_id, items=items)
        )

    async def finish(
        self, held: Held, num_tokens: int, state: RequestState, terminal: TerminalMessage
    ) -> FinishReply:
        """Publish the terminal entry, then acknowledge: one atomic step."""
        code = terminal.error_code
        return await self._link.run(
            functions.finish(
                self._keys,
                worker_id=self._worker_id,
                tenant=held.tenant,
                request_id=held.request_id,
                epoch=held.epoch,
                num_tokens=num_tokens,
                state=state,
                terminal=encode_terminal(terminal),
                finish_reason=terminal.finish_reason.value,
                error_code=None if code is None else code.value,
                error_message=terminal.error_message,
            )
        )

    async def renew(self, held: Sequence[Held]) -> tuple[Held, ...]:
        """Prolong leases; return those that are lost."""
        lost: list[Held] = []
        for bite in _bites(held):
            call = functions.renew(
                self._keys, worker_id=self._worker_id, held=bite, lease_ms=self._lease_ms
            )
            found = await self._link.run(call)
            lost += found
        return tuple(lost)

    async def release(self, held: Sequence[Held], *, strike: bool, cause: str = "") -> int:
        """Hand requests back, claimable at once; return how many were ours.

        Who died together is told of in one call, which is how the queue knows.
        """
        num_ours = 0
        for bite in [held] if strike else _bites(held):
            num_ours += await self._link.run(
                functions.release(
                    self._keys,
                    worker_id=self._worker_id,
                    held=bite,
                    strike=strike,
                    cause=cause,
                    max_strikes=self._max_strikes,
                )
            )
        return num_ours

    async def wishes(self, held: Sequence[Held]) -> AsyncIterator[Wish]:
        """Yield what clients want of those that are ours, as it is heard."""
        for bite in _bites(held):
            call = functions.wishes(self._keys, worker_id=self._worker_id, held=bite)
            for wish in await self._link.run(call):
                yield wish

    async def status(self, held: Held) -> RequestStatus | None:
        """Return what the queue knows of a request."""
        return await self._link.run(
            functions.status(self._keys, tenant=held.tenant, request_id=held.request_id)
        )

    async def depth(self) -> QueueDepth:
        """Return true counts."""
        return await self._link.run(functions.depth(self._keys))

    def _lost(self, what: str, cause: Exception) -> TransportError:
        error = TransportError(f"Redis: {cause or type(cause).__name__}")
        error.__cause__ = cause
        self._link.lost(what, error)
        return error


def _bites(held: Sequence[Held]) -> list[Sequence[Held]]:
    return [held[at : at + HELD_A_CALL] for at in range(0, len(held), HELD_A_CALL)]
