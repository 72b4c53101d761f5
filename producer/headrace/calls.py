"""Building calls of the queue's functions: one builder a function, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import msgpack

from headrace import parsing
from headrace.keys import Keys
from headrace.replies import (
    ClaimReply,
    DeadLetter,
    EmitItem,
    EmitReply,
    EnqueueReply,
    FinishReply,
    Held,
    QueueDepth,
    ReapReply,
    Wish,
)
from headrace.types import RequestState, RequestStatus

LIBRARY = "headrace_1"
"""Name of the function library; it carries the protocol's version, so two can live side by side."""

MAX_STRIKES = 3
"""Strikes, one a vanished holder, at which a request that ran alone becomes a dead letter."""

T = TypeVar("T")
Arg = bytes | str | int


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One function call, ready to be sent; it may be sent again when the reply is lost."""

    function: str  # without the library's name
    key: str  # KEYS[1], the queue's base key
    args: tuple[Arg, ...]
    parse: Callable[[Any], T]  # turns the raw reply into a value
    read_only: bool = False  # FCALL_RO: a replica may answer


def enqueue(
    keys: Keys,
    *,
    tenant: str,
    request_id: str,
    payload: bytes,
    cost: int,
    priority: int,
    result_ttl_ms: int,
    ttl_ms: int | None = None,
    deadline_ms: int | None = None,
    max_queued: int | None = None,
    max_queued_per_tenant: int | None = None,
    attached: bool = True,
) -> Call[EnqueueReply]:
    """Queue a request once.

    Of ``ttl_ms`` (from now) and ``deadline_ms`` (Unix time by Redis's clock) the earlier counts.
    ``cost`` estimates prompt and output tokens. ``attached`` asks for tokens as they come. The
    bounds count what waits, of the queue and of the tenant; handed-back requests pass them.
    """
    args: tuple[Arg, ...] = (
        *(tenant, request_id, payload, cost, priority),
        *(_optional(ttl_ms), _optional(deadline_ms), result_ttl_ms, _optional(max_queued)),
        *(int(attached), _optional(max_queued_per_tenant)),
    )
    return Call("enqueue", keys.base, args, parsing.parse_enqueue)


def claim(
    keys: Keys,
    *,
    worker_id: str,
    nonce: str,
    free_seqs: int,
    free_tokens: int,
    total_tokens: int,
    lease_ms: int,
    max_strikes: int = MAX_STRIKES,
    if_displaced: Sequence[tuple[int, int, int]] = (),
) -> Call[ClaimReply]:
    """Take what fits; the same nonce gets the same grants again.

    ``free_tokens`` and ``total_tokens`` count KV slots. A cost above ``total_tokens`` counts as
    ``total_tokens``, so that every request fits an empty worker, which then runs or refuses it.
    ``if_displaced`` has for each priority that runs there, soonest first, the sequences and tokens
    that requests of sooner ones would find if all of that priority and later gave way.
    """
    room = (free_seqs, free_tokens, total_tokens)
    args: list[Arg] = [worker_id, nonce, *room, lease_ms, max_strikes]
    args += (number for left in if_displaced for number in left)
    return Call("claim", keys.base, tuple(args), parsing.parse_claim)


def emit(keys: Keys, *, worker_id: str, items: Sequence[EmitItem]) -> Call[tuple[EmitReply, ...]]:
    """Append chunks to token logs; one reply for each item, in order."""
    flat: list[Arg] = []
    for item in items:
        flat += (item.tenant, item.request_id, item.epoch, item.offset, item.num_tokens, item.entry)
    # Redis's Lua reads the msgpack of before 2013, in which text and bytes are one type.
    packed = bytes(msgpack.packb(flat, use_bin_type=False))
    args = (worker_id, packed)
    return Call("emit", keys.base, args, partial(parsing.parse_emit, tuple(items)))


def finish(
    keys: Keys,
    *,
    worker_id: str,
    tenant: str,
    request_id: str,
    epoch: int,
    num_tokens: int,
    state: RequestState,
    terminal: bytes,
    finish_reason: str,
    error_code: str | None = None,
    error_message: str = "",
) -> Call[FinishReply]:
    """End a request: terminal entry, state and acknowledgement in one step."""
    args = (
        *(worker_id, tenant, request_id, epoch, num_tokens, state.value, terminal),
        *(finish_reason, error_code or "", error_message),
    )
    return Call("finish", keys.base, args, parsing.parse_finish)


def renew(
    keys: Keys, *, worker_id: str, held: Sequence[Held], lease_ms: int
) -> Call[tuple[Held, ...]]:
    """Prolong leases; the reply names those that are lost."""
    args = (worker_id, lease_ms, *_flat(held))
    return Call("renew", keys.base, args, parsing.parse_held)


def release(
    keys: Keys,
    *,
    worker_id: str,
    held: Sequence[Held],
    strike: bool = False,
    cause: str = "",
    max_strikes: int = MAX_STRIKES,
) -> Call[int]:
    """Hand requests back, claimable at once and before newer ones; the reply counts them.

    ``strike`` is for an engine that died while its transport lives, of the cause: as if the holder
    had vanished, but with all that it made in the log.
    """
    flag: Arg = f"1 {cause}" if strike and cause else int(strike)
    args = (worker_id, flag, max_strikes, *_flat(held))
    return Call("release", keys.base, args, int)


def reap(
    keys: Keys, *, worker_id: str, lease_ms: int, count: int, max_strikes: int = MAX_STRIKES
) -> Call[ReapReply]:
    """Take back up to ``count`` requests whose lease ran out, and end those past their deadline.

    All workers call it; within a quarter of a lease, the first caller alone does the work.
    """
    return Call("reap", keys.base, (worker_id, lease_ms, count, max_strikes), parsing.parse_reap)


def cancel(keys: Keys, *, tenant: str, request_id: str) -> Call[RequestState | None]:
    """Cancel: at once when queued, else by a flag that the holder meets at its next emit.

    The reply is the state afterwards, None for an unknown request.
    """
    return Call("cancel", keys.base, (tenant, request_id), parsing.parse_state)


def finish_now(keys: Keys, *, tenant: str, request_id: str) -> Call[RequestState | None]:
    """End with what there is: at once when queued, else by a flag that the holder meets.

    The reply is that of ``cancel``; the end is an answer, with reason "stopped_early".
    """
    return Call("finish_now", keys.base, (tenant, request_id), parsing.parse_state)


def reprioritise(
    keys: Keys, *, tenant: str, request_id: str, priority: int
) -> Call[RequestState | None]:
    """Move a request to another lane; a hint tells its holder, when there is one.

    The reply is its state, None for an unknown request; one that has ended stays as it was.
    """
    args = (tenant, request_id, priority)
    return Call("reprioritise", keys.base, args, parsing.parse_state)


def wishes(keys: Keys, *, worker_id: str, held: Sequence[Held]) -> Call[tuple[Wish, ...]]:
    """Say what clients want of requests, of those that the worker does hold."""
    args = (worker_id, *_flat(held))
    return Call("wishes", keys.base, args, parsing.parse_wishes, read_only=True)


def status(keys: Keys, *, tenant: str, request_id: str) -> Call[RequestStatus | None]:
    """Say what the queue knows of a request; None when it knows nothing."""

    def parse(reply: Any) -> RequestStatus | None:
        return parsing.parse_status(reply, request_id)

    return Call("status", keys.base, (tenant, request_id), parse, read_only=True)


def heartbeat(
    keys: Keys, *, worker_id: str, info: Mapping[str, str | int], ttl_ms: int
) -> Call[None]:
    """Tell that a worker is alive; names in ``info`` must not begin with an underscore."""
    flat = [part for pair in info.items() for part in pair]
    return Call("heartbeat", keys.base, (worker_id, ttl_ms, *flat), parsing.parse_nothing)


def janitor(keys: Keys, *, worker_id: str, count: int) -> Call[int]:
    """Remove what dead workers left, repair what was removed by hand; ``count`` bounds one call."""
    return Call("janitor", keys.base, (worker_id, count), int)


def depth(keys: Keys) -> Call[QueueDepth]:
    """Count the requests that wait and run."""
    return Call("depth", keys.base, (), parsing.parse_depth, read_only=True)


def list_dead(keys: Keys, *, count: int = 100, start: str = "-") -> Call[tuple[DeadLetter, ...]]:
    """List dead letters, oldest first, from an entry id on."""
    return Call("list_dead", keys.base, (count, start), parsing.parse_dead, read_only=True)


def replay_dead(keys: Keys, *, entry_id: str) -> Call[bool]:
    """Queue a dead letter again under its own id, with no strikes and an empty token log.

    False when the letter is gone, or its id belongs to another request by now.
    """
    return Call("replay_dead", keys.base, (entry_id,), bool)


def purge_dead(keys: Keys, *, entry_ids: Sequence[str] | None = None) -> Call[int]:
    """Delete dead letters, all of them unless some are named; the reply counts them."""
    if entry_ids is not None and not entry_ids:
        return Call("purge_dead", keys.base, ("0-0",), int)  # none named: none deleted
    return Call("purge_dead", keys.base, tuple(entry_ids or ()), int)


def _optional(value: int | None) -> Arg:
    return "" if value is None else value


def _flat(held: Iterable[Held]) -> list[Arg]:
    args: list[Arg] = []
    for item in held:
        args += (item.tenant, item.request_id, item.epoch)
    return args
