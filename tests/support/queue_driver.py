"""Calling the queue's functions in tests, with defaults for all that a test is not about."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis

from headrace import functions
from headrace.functions import (
    Call,
    ClaimReply,
    EmitItem,
    EmitReply,
    EnqueueReply,
    FinishReply,
    Grant,
    Held,
    QueueDepth,
    ReapReply,
    T,
)
from headrace.keys import Keys
from headrace.protocol import (
    CHUNK_FIELD,
    TERMINAL_FIELD,
    ChunkMessage,
    TerminalMessage,
    decode_chunk,
    decode_terminal,
    encode_chunk,
    encode_terminal,
)
from headrace.types import FinishReason, RequestState, RequestStatus
from support.waiting import eventually

TENANT = "acme"
TOTAL_TOKENS = 1000
LEASE_MS = 60_000

LogEntry = tuple[str, bytes, bytes]
"""As read from a token log: id, field, value."""


@dataclass(slots=True)
class QueueDriver:
    """One queue, seen by several workers and clients that are only names."""

    client: redis.Redis
    keys: Keys
    _died_ms: int = 0  # the server's clock when the last death had been told, Unix ms

    def run(self, call: Call[T]) -> T:
        """Call a function."""
        return functions.run_sync(self.client, call)

    def enqueue(self, request_id: str = "r1", tenant: str = TENANT, **options: Any) -> EnqueueReply:
        """Enqueue with a payload that names the request."""
        defaults: dict[str, Any] = {
            "payload": request_id.encode(),
            "cost": 10,
            "priority": 5,
            "result_ttl_ms": 60_000,
        }
        options = {**defaults, **options}
        return self.run(
            functions.enqueue(self.keys, tenant=tenant, request_id=request_id, **options)
        )

    def claim(self, worker_id: str = "w1", **options: Any) -> ClaimReply:
        """Claim for an empty worker with room for eight, under a nonce of its own."""
        defaults: dict[str, Any] = {
            "nonce": uuid.uuid4().hex,
            "free_seqs": 8,
            "free_tokens": TOTAL_TOKENS,
            "total_tokens": TOTAL_TOKENS,
            "lease_ms": LEASE_MS,
        }
        return self.run(functions.claim(self.keys, worker_id=worker_id, **{**defaults, **options}))

    def grant(self, worker_id: str = "w1", **options: Any) -> Grant:
        """Claim one request, which must be there."""
        (grant,) = self.claim(worker_id, **{"free_seqs": 1, **options}).grants
        return grant

    def emit(
        self, grant: Grant, offset: int = 0, num_tokens: int = 1, worker_id: str = "w1"
    ) -> EmitReply:
        """Emit tokens whose ids are their offsets."""
        (reply,) = self.emit_all([chunk_of(grant, offset, num_tokens)], worker_id)
        return reply

    def emit_all(self, items: Sequence[EmitItem], worker_id: str = "w1") -> tuple[EmitReply, ...]:
        """Emit several chunks in one call."""
        return self.run(functions.emit(self.keys, worker_id=worker_id, items=items))

    def finish(
        self,
        grant: Grant,
        num_tokens: int = 0,
        worker_id: str = "w1",
        state: RequestState = RequestState.FINISHED,
    ) -> FinishReply:
        """Finish with reason "stop"."""
        terminal = encode_terminal(TerminalMessage(FinishReason.STOP, worker_id=worker_id))
        return self.run(
            functions.finish(
                self.keys,
                worker_id=worker_id,
                tenant=grant.tenant,
                request_id=grant.request_id,
                epoch=grant.epoch,
                num_tokens=num_tokens,
                state=state,
                terminal=terminal,
                finish_reason=FinishReason.STOP,
            )
        )

    def renew(self, *grants: Grant, worker_id: str = "w1") -> tuple[Held, ...]:
        """Renew leases; returns what is lost."""
        held = [grant.held for grant in grants]
        return self.run(
            functions.renew(self.keys, worker_id=worker_id, held=held, lease_ms=LEASE_MS)
        )

    def release(
        self, *grants: Grant, worker_id: str = "w1", strike: bool = False, cause: str = ""
    ) -> int:
        """Hand requests back."""
        held = [grant.held for grant in grants]
        return self.run(
            functions.release(self.keys, worker_id=worker_id, held=held, strike=strike, cause=cause)
        )

    def die(self, *grants: Grant, worker_id: str = "w1", cause: str = "killed by signal 9") -> int:
        """Tell of a worker's death, at a later moment than the last one.

        What dies on one worker in one millisecond died together, as the queue sees it. No worker
        dies twice in that time, but a test is fast enough.
        """
        eventually(lambda: self.clock_ms() > self._died_ms)
        num_released = self.release(*grants, worker_id=worker_id, strike=True, cause=cause)
        self._died_ms = self.clock_ms()
        return num_released

    def clock_ms(self) -> int:
        """Return the server's clock, Unix ms."""
        seconds, microseconds = self.client.time()
        return int(seconds) * 1000 + int(microseconds) // 1000

    def reap(self, worker_id: str = "w9", lease_ms: int = LEASE_MS, count: int = 100) -> ReapReply:
        """Sweep once."""
        return self.run(
            functions.reap(self.keys, worker_id=worker_id, lease_ms=lease_ms, count=count)
        )

    def reap_after(self, lease_ms: int, worker_id: str = "w9", count: int = 100) -> ReapReply:
        """Sweep as if all leases were so long, whatever the workers said."""
        for key in self.client.scan_iter(f"{self.keys.worker('*')}"):
            self.client.hset(key, "_lease_ms", lease_ms)
        return self.reap(worker_id, lease_ms, count)

    def let_leases_lapse(self) -> ReapReply:
        """Sweep as if leases lasted 1 ms, until nobody holds anything; returns what was found."""
        replies: list[ReapReply] = []

        def sweep() -> bool:
            replies.append(self.reap_after(1))
            return self.depth().running == 0

        eventually(sweep)
        self._died_ms = self.clock_ms()
        return ReapReply(
            requeued=tuple(ref for reply in replies for ref in reply.requeued),
            dead_lettered=tuple(ref for reply in replies for ref in reply.dead_lettered),
            expired=tuple(ref for reply in replies for ref in reply.expired),
        )

    def let_deadline_pass(self, request_id: str = "r1", tenant: str = TENANT) -> None:
        """Put the deadline of a request, which must have one, an hour back."""
        self.move_deadline(-3_600_000, request_id, tenant)

    def move_deadline(self, in_ms: int, request_id: str = "r1", tenant: str = TENANT) -> None:
        """Give a request, which must have a deadline, one that comes in so many ms.

        A worker that holds it already keeps the one that it was told.
        """
        deadline_ms = self.clock_ms() + in_ms
        member = f"{tenant}:{request_id}"
        assert self.client.zscore(self.keys.deadlines, member) is not None
        self.client.hset(self.keys.request(tenant, request_id), "deadline_ms", deadline_ms)
        self.client.zadd(self.keys.deadlines, {member: deadline_ms})

    def cancel(self, request_id: str = "r1", tenant: str = TENANT) -> RequestState | None:
        """Cancel."""
        return self.run(functions.cancel(self.keys, tenant=tenant, request_id=request_id))

    def finish_now(self, request_id: str = "r1", tenant: str = TENANT) -> RequestState | None:
        """Ask for an end with what there is."""
        return self.run(functions.finish_now(self.keys, tenant=tenant, request_id=request_id))

    def reprioritise(
        self, priority: int, request_id: str = "r1", tenant: str = TENANT
    ) -> RequestState | None:
        """Move a request to another lane."""
        return self.run(
            functions.reprioritise(
                self.keys, tenant=tenant, request_id=request_id, priority=priority
            )
        )

    def status(self, request_id: str = "r1", tenant: str = TENANT) -> RequestStatus:
        """Return the status of a request that must be known."""
        status = self.run(functions.status(self.keys, tenant=tenant, request_id=request_id))
        assert status is not None, f"{request_id} is not known"
        return status

    def depth(self) -> QueueDepth:
        """Count."""
        return self.run(functions.depth(self.keys))

    def heartbeat(self, worker_id: str = "w1", ttl_ms: int = 60_000) -> None:
        """Tell that a worker is alive."""
        self.run(functions.heartbeat(self.keys, worker_id=worker_id, info={}, ttl_ms=ttl_ms))

    def janitor(self, count: int = 1000) -> int:
        """Clean up once."""
        return self.run(functions.janitor(self.keys, worker_id="w9", count=count))

    def log(self, request_id: str = "r1", tenant: str = TENANT) -> list[LogEntry]:
        """Return the raw entries of a token log: id, field, value."""
        entries: Any = self.client.xrange(self.keys.token_log(tenant, request_id))
        return [(id.decode(), *next(iter(fields.items()))) for id, fields in entries]

    def tokens(self, request_id: str = "r1", tenant: str = TENANT) -> list[int]:
        """Return the token ids in a log."""
        chunks = chunks_in(self.log(request_id, tenant))
        return [token for chunk in chunks for token in chunk.token_ids]

    def end(self, request_id: str = "r1", tenant: str = TENANT) -> TerminalMessage:
        """Return the one terminal entry of a log, which must be its last."""
        return end_in(self.log(request_id, tenant), request_id)


def chunks_in(log: Sequence[LogEntry]) -> list[ChunkMessage]:
    """Return the chunks of a token log that was read."""
    return [decode_chunk(value) for _, name, value in log if name == CHUNK_FIELD]


def end_in(log: Sequence[LogEntry], request_id: str) -> TerminalMessage:
    """Return the one terminal entry of a log that was read, which must be its last."""
    ends = [value for _, name, value in log if name == TERMINAL_FIELD]
    assert len(ends) == 1, f"{request_id} has {len(ends)} terminal entries"
    assert log[-1][1] == TERMINAL_FIELD, f"{request_id} goes on after its end"
    return decode_terminal(ends[0])


def chunk_of(grant: Grant, offset: int, num_tokens: int) -> EmitItem:
    """Return a chunk for the grant whose token ids are their offsets."""
    token_ids = tuple(range(offset, offset + num_tokens))
    entry = encode_chunk(ChunkMessage(token_ids, ("x",) * num_tokens))
    return EmitItem(grant.tenant, grant.request_id, grant.epoch, offset, num_tokens, entry)
