"""A request that asks for n answers travels as n requests: their names, and their common status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.types import RequestState, RequestStatus


def member_id(request_id: str, index: int) -> str:
    """Return the name under which one of n answers travels."""
    return f"{request_id}/{index}"


def merge_statuses(request_id: str, members: Sequence[RequestStatus]) -> RequestStatus:
    """Return one status for a group: the state of the member that is furthest from success."""
    states = {member.state for member in members}
    decisive = next(state for state in _ORDER if state in states)
    first = next(member for member in members if member.state is decisive)
    started = [m.started_at_s for m in members if m.started_at_s is not None]
    finished = [m.finished_at_s for m in members if m.finished_at_s is not None]
    return replace(
        first,
        request_id=request_id,
        num_tokens=sum(member.num_tokens for member in members),
        epoch=max(member.epoch for member in members),
        strikes=max(member.strikes for member in members),
        enqueued_at_s=min(member.enqueued_at_s for member in members),
        started_at_s=min(started, default=None),
        finished_at_s=max(finished, default=None) if decisive.is_terminal else None,
    )


_ORDER = (
    RequestState.RUNNING,
    RequestState.QUEUED,
    RequestState.FAILED,
    RequestState.CANCELLED,
    RequestState.FINISHED,
)
