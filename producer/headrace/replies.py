"""What the queue's functions take and answer: frozen values, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.errors import QueueBound
from headrace.types import RequestState


class EnqueueOutcome(StrEnum):
    """What became of an enqueue."""

    OK = "OK"  # queued now
    DUPLICATE = "DUPLICATE"  # known: same id, same payload
    CONFLICT = "CONFLICT"  # same id, other payload
    FULL = "FULL"  # a bound on queued requests is reached


class EmitOutcome(StrEnum):
    """What became of an emitted chunk; a worker drops the request at FENCED, DONE and GONE."""

    OK = "OK"  # in the log, now or since an earlier call
    FENCED = "FENCED"  # another grant holds the request
    DONE = "DONE"  # the request has ended
    GONE = "GONE"  # its keys are missing or unusable
    GAP = "GAP"  # the log ends before the chunk begins: go back to the offset
    OVERLAP = "OVERLAP"  # the log holds a part of the chunk, or other tokens: go on from the offset
    CANCEL = "CANCEL"  # in the log, and a client wants the request to stop
    FINISH = "FINISH"  # in the log, and a client wants the request to end with what there is


class FinishOutcome(StrEnum):
    """What became of a finish; a worker drops the request at all of them but GAP."""

    OK = "OK"  # ended, now or by an earlier call of the same grant
    FENCED = "FENCED"
    DONE = "DONE"  # ended by somebody else
    GONE = "GONE"
    GAP = "GAP"  # the log holds another number of tokens: the offset


@dataclass(frozen=True, slots=True)
class EnqueueReply:
    """Answer to enqueue."""

    outcome: EnqueueOutcome
    state: RequestState | None = None  # None when FULL
    retry_after_s: float | None = None  # only when FULL
    bound: QueueBound | None = None  # likewise


@dataclass(frozen=True, slots=True)
class RequestRef:
    """The name of a request."""

    tenant: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Held:
    """A request that a worker holds."""

    tenant: str
    request_id: str
    epoch: int  # >= 1, of the grant


class WishedEnd(StrEnum):
    """How a client wants a running request to end."""

    CANCEL = "CANCEL"  # with an error that says so
    FINISH = "FINISH"  # with what there is


@dataclass(frozen=True, slots=True)
class Wish:
    """What clients want of a request that a worker holds."""

    held: Held
    end: WishedEnd | None  # None: let it run
    priority: int  # 0 soonest … 9; the one at the grant, unless somebody has changed it


@dataclass(frozen=True, slots=True)
class Grant:
    """A request that a worker may run until its lease ends."""

    tenant: str
    request_id: str
    epoch: int  # >= 1; every write carries it
    num_tokens: int  # tokens that earlier grants have put into the log
    payload: bytes  # protocol.decode_request reads it
    cost: int  # tokens, estimate of prompt and output
    priority: int  # 0 soonest … 9
    strikes: int  # holders that vanished
    attached: bool  # somebody reads the stream as it grows
    enqueued_ms: int  # Unix time by Redis's clock
    deadline_ms: int | None  # by the same clock
    now_ms: int  # that clock at the claim; subtract to get ages without a clock of one's own

    @property
    def held(self) -> Held:
        """The grant as renew and release name it."""
        return Held(self.tenant, self.request_id, self.epoch)


@dataclass(frozen=True, slots=True)
class ClaimReply:
    """Answer to claim."""

    grants: tuple[Grant, ...]
    wake_cursor: str  # XREAD BLOCK keys.wake from here when there is nothing to do
    broken_lanes: tuple[str, ...] = ()  # keys of the wrong type; somebody has to look at them


@dataclass(frozen=True, slots=True)
class EmitItem:
    """One chunk for one token log."""

    tenant: str
    request_id: str
    epoch: int  # >= 1
    offset: int  # tokens before this chunk, >= 0
    num_tokens: int  # in this chunk, >= 1
    entry: bytes  # protocol.encode_chunk made it


@dataclass(frozen=True, slots=True)
class EmitReply:
    """Answer to one emitted chunk."""

    outcome: EmitOutcome
    offset: int  # tokens that the log holds now


@dataclass(frozen=True, slots=True)
class FinishReply:
    """Answer to finish."""

    outcome: FinishOutcome
    offset: int  # tokens that the log holds


@dataclass(frozen=True, slots=True)
class ReapReply:
    """What one sweep took back or closed."""

    requeued: tuple[RequestRef, ...]
    dead_lettered: tuple[RequestRef, ...]
    expired: tuple[RequestRef, ...]


@dataclass(frozen=True, slots=True)
class TenantDepth:
    """Counts of one tenant over all lanes."""

    queued: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """True counts, kept by the functions themselves: neither XLEN nor lag tells them."""

    queued: int
    running: int
    payload_bytes: int  # of requests that have not ended
    queued_by_lane: Mapping[int, int] = field(default_factory=dict)  # lanes with work only
    by_tenant: Mapping[str, TenantDepth] = field(default_factory=dict)  # tenants with work only


@dataclass(frozen=True, slots=True)
class Death:
    """One holder of a request that vanished."""

    worker_id: str
    epoch: int  # of its grant, >= 1
    granted_tokens: int  # tokens in the log at the grant
    num_tokens: int  # the same when it vanished; what is between is progress
    was_alone: bool  # the worker ran nothing else
    at_ms: int  # Unix time by Redis's clock
    cause: str  # exit signal or status, or an exception without what it quotes


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A request that took down the worker that ran it alone."""

    entry_id: str  # names it in replay and purge; begins with Unix milliseconds
    tenant: str
    request_id: str
    reason: str
    strikes: int
    worker_id: str  # the last one that held it
    payload_bytes: int
    evidence: tuple[Death, ...] = ()  # the last deaths, oldest first
