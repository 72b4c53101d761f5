"""Reading the raw replies of the queue's functions, nothing taken on trust but their shape."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgpack

from headrace.errors import QueueBound
from headrace.keys import LANES
from headrace.replies import (
    ClaimReply,
    DeadLetter,
    Death,
    EmitItem,
    EmitOutcome,
    EmitReply,
    EnqueueOutcome,
    EnqueueReply,
    FinishOutcome,
    FinishReply,
    Grant,
    Held,
    QueueDepth,
    ReapReply,
    RequestRef,
    TenantDepth,
    Wish,
    WishedEnd,
)
from headrace.types import FinishReason, RequestState, RequestStatus

_COUNT = re.compile(r"[0-9]{1,14}")
_LANES = frozenset(str(lane) for lane in range(LANES))


def parse_enqueue(reply: Any) -> EnqueueReply:
    """Read ``[outcome, state]`` or ``[FULL, retry after ms, bound]``."""
    outcome = EnqueueOutcome(_text(reply[0]))
    if outcome is EnqueueOutcome.FULL:
        bound = QueueBound(_text(reply[2]))
        return EnqueueReply(outcome, retry_after_s=int(reply[1]) / 1000, bound=bound)
    return EnqueueReply(outcome, RequestState(_text(reply[1])))


def parse_claim(reply: Any) -> ClaimReply:
    """Read ``[grants, wake cursor, broken lanes]``."""
    grants, cursor, broken = reply
    return ClaimReply(
        tuple(_grant(item) for item in grants), _text(cursor), tuple(_text(key) for key in broken)
    )


def parse_emit(items: Sequence[EmitItem], reply: Any) -> tuple[EmitReply, ...]:
    """Read ``[[place, outcome, offset], …]`` of the items that were not simply appended."""
    told = {
        int(place): EmitReply(EmitOutcome(_text(outcome)), int(offset))
        for place, outcome, offset in reply
    }
    return tuple(
        told.get(place) or EmitReply(EmitOutcome.OK, item.offset + item.num_tokens)
        for place, item in enumerate(items, 1)
    )


def parse_finish(reply: Any) -> FinishReply:
    """Read ``[outcome, offset]``."""
    return FinishReply(FinishOutcome(_text(reply[0])), int(reply[1]))


def parse_held(reply: Any) -> tuple[Held, ...]:
    """Read ``[[tenant, request id, epoch], …]``."""
    return tuple(Held(_text(tenant), _text(name), int(epoch)) for tenant, name, epoch in reply)


def parse_reap(reply: Any) -> ReapReply:
    """Read ``[requeued, dead-lettered, expired]``, lists of ``[tenant, request id]``."""
    requeued, dead, expired = (
        tuple(RequestRef(_text(tenant), _text(name)) for tenant, name in part) for part in reply
    )
    return ReapReply(requeued, dead, expired)


def parse_state(reply: Any) -> RequestState | None:
    """Read a state, or nil."""
    return None if reply is None else RequestState(_text(reply))


def parse_wishes(reply: Any) -> tuple[Wish, ...]:
    """Read msgpack: ``[[tenant, request id, epoch, end or "", priority], …]``."""
    return tuple(
        Wish(Held(tenant, name, epoch), WishedEnd(end) if end else None, priority)
        for tenant, name, epoch, end, priority in msgpack.unpackb(reply)
    )


def parse_nothing(_reply: Any) -> None:
    """Drop a reply that says nothing."""


def parse_status(reply: Any, request_id: str) -> RequestStatus | None:
    """Read the fields that status returns, in its order, or nil."""
    if reply is None:
        return None
    state, tokens, epoch, strikes, lane, owner, enqueued, started, finished, deadline = reply[:10]
    reason, code, message = (_optional_text(value) for value in reply[10:])
    return RequestStatus(
        request_id=request_id,
        state=RequestState(_text(state)),
        num_tokens=int(tokens),
        epoch=int(epoch),
        strikes=int(strikes),
        priority=int(lane),
        owner=_optional_text(owner),
        enqueued_at_s=int(enqueued) / 1000,
        started_at_s=_seconds(started),
        finished_at_s=_seconds(finished),
        deadline_at_s=_seconds(deadline),
        finish_reason=None if reason is None else FinishReason(reason),
        error_code=code,
        error_message=message,
    )


def parse_depth(reply: Any) -> QueueDepth:
    """Read the hash of counts: ``queued``, ``queued:<lane>``, ``queued:<lane>:<tenant>``, …."""
    counts = {_text(name): _count(value) for name, value in _pairs(reply)}
    lanes: dict[int, int] = {}
    tenants: dict[str, dict[str, int]] = defaultdict(lambda: {"queued": 0, "running": 0})
    for name, number in counts.items():
        what, *path = name.split(":")
        if what not in ("queued", "running") or not path or path[0] not in _LANES:
            continue
        if len(path) == 2:
            tenants[path[1]][what] += number
        elif what == "queued":
            lanes[int(path[0])] = number
    return QueueDepth(
        queued=counts.get("queued", 0),
        running=counts.get("running", 0),
        payload_bytes=counts.get("bytes", 0),
        queued_by_lane=lanes,
        by_tenant={tenant: TenantDepth(**work) for tenant, work in tenants.items()},
    )


def parse_dead(reply: Any) -> tuple[DeadLetter, ...]:
    """Read ``[[entry id, tenant, request id, reason, strikes, worker, bytes, deaths], …]``."""
    return tuple(
        DeadLetter(
            entry_id=_text(entry_id),
            tenant=_text(tenant),
            request_id=_text(name),
            reason=_text(reason),
            strikes=int(strikes),
            worker_id=_text(worker_id),
            payload_bytes=int(payload_bytes),
            evidence=tuple(_death(death) for death in deaths),
        )
        for entry_id, tenant, name, reason, strikes, worker_id, payload_bytes, deaths in reply
    )


def _death(item: Any) -> Death:
    worker_id, epoch, granted_tokens, num_tokens, was_alone, at_ms, cause = item
    return Death(
        worker_id=_text(worker_id),
        epoch=int(epoch),
        granted_tokens=int(granted_tokens),
        num_tokens=int(num_tokens),
        was_alone=int(was_alone) == 1,
        at_ms=int(at_ms),
        cause=_text(cause),
    )


def _grant(item: Any) -> Grant:
    tenant, name, epoch, tokens, payload, cost, lane, strikes, attached, enqueued, deadline, now = (
        item
    )
    return Grant(
        tenant=_text(tenant),
        request_id=_text(name),
        epoch=int(epoch),
        num_tokens=int(tokens),
        payload=bytes(payload),
        cost=int(cost),
        priority=int(lane),
        strikes=int(strikes),
        attached=int(attached) == 1,
        enqueued_ms=int(enqueued),
        deadline_ms=int(deadline) if deadline else None,
        now_ms=int(now),
    )


def _count(value: Any) -> int:
    """Read a count; any producer may write into the hash of counts, and what is none is 0."""
    said = _text(value)
    return int(said) if _COUNT.fullmatch(said) else 0


def _pairs(reply: Any) -> list[tuple[Any, Any]]:
    if isinstance(reply, dict):  # RESP3 may say it is a map
        return list(reply.items())
    return list(zip(reply[::2], reply[1::2], strict=True))


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _optional_text(value: Any) -> str | None:
    return None if value is None else _text(value)


def _seconds(milliseconds: Any) -> float | None:
    return None if milliseconds is None else int(milliseconds) / 1000
