"""Running the queue's functions: load the library when it is missing, map Redis's refusals.

Builders and replies are re-exported, so that this module is all that a user of the queue imports.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from ssl import SSLCertVerificationError
from typing import Any, TypeVar

import redis
import redis.asyncio
from redis import exceptions

from headrace.calls import (
    LIBRARY,
    Call,
    cancel,
    claim,
    depth,
    emit,
    enqueue,
    finish,
    finish_now,
    heartbeat,
    janitor,
    list_dead,
    purge_dead,
    reap,
    release,
    renew,
    replay_dead,
    reprioritise,
    status,
    wishes,
)
from headrace.errors import ProtocolError, TransportError
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

__all__ = [
    "LIBRARY",
    "REDIS_FAILURES",
    "Call",
    "ClaimReply",
    "DeadLetter",
    "Death",
    "EmitItem",
    "EmitOutcome",
    "EmitReply",
    "EnqueueOutcome",
    "EnqueueReply",
    "FinishOutcome",
    "FinishReply",
    "Grant",
    "Held",
    "QueueDepth",
    "ReapReply",
    "RequestRef",
    "TenantDepth",
    "Wish",
    "WishedEnd",
    "cancel",
    "claim",
    "depth",
    "emit",
    "enqueue",
    "finish",
    "finish_now",
    "heartbeat",
    "is_not_now",
    "is_or_wraps",
    "is_passing",
    "is_standstill",
    "is_untrusted",
    "janitor",
    "library_code",
    "list_dead",
    "load_library",
    "load_library_sync",
    "purge_dead",
    "reap",
    "release",
    "renew",
    "replay_dead",
    "reprioritise",
    "run",
    "run_sync",
    "status",
    "wishes",
]

T = TypeVar("T")

REDIS_FAILURES = (exceptions.RedisError, OSError, TypeError, AttributeError)
"""What redis-py raises; the last two when a connection breaks at a bad moment."""

_PARTS = (
    "library",
    "lane",
    "request",
    "strikes",
    "promotion",
    "enqueue",
    "turns",
    "room",
    "claim",
    "tokens",
    "leases",
    "control",
    "books",
    "upkeep",
    "dead_letters",
)

# Files that no other uses the names of; Lua takes 200 names outside of blocks, and no more.
_LEAVES = frozenset({"claim", "tokens", "control", "upkeep", "dead_letters"})

# Redis says "not now" in these words, or redis-py in these errors, from which it strips the word:
# nothing ran, and the caller tries later. docs/protocol.md says who waits for how long.
_NOT_NOW = (
    "BUSY ",
    "CLUSTERDOWN",
    "LOADING",
    "MASTERDOWN",
    "MISCONF",
    "NOREPLICAS",
    "OOM",
    "READONLY",
    "TRYAGAIN",
    "UNBLOCKED",
)
_NOT_NOW_ERRORS = (
    exceptions.BusyLoadingError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError,
    exceptions.TryAgainError,
)


async def run(redis: redis.asyncio.Redis, call: Call[T]) -> T:
    """Call the function and parse its reply; raises TransportError."""
    with _refusals():
        try:
            reply = await _send(redis, call)
        except exceptions.ResponseError as error:
            if not _is_missing(error):
                raise
            await redis.function_load(library_code(), replace=True)
            reply = await _send(redis, call)
    return _parsed(call, reply)


def run_sync(redis: redis.Redis, call: Call[T]) -> T:
    """Do what ``run`` does, for a blocking connection."""
    with _refusals():
        try:
            reply = _send(redis, call)
        except exceptions.ResponseError as error:
            if not _is_missing(error):
                raise
            redis.function_load(library_code(), replace=True)
            reply = _send(redis, call)
    return _parsed(call, reply)


async def load_library(redis: redis.asyncio.Redis) -> None:
    """Put this release's code in place of whatever code the library has; raises TransportError."""
    with _refusals():
        await redis.function_load(library_code(), replace=True)


def load_library_sync(redis: redis.Redis) -> None:
    """Do what ``load_library`` does, for a blocking connection."""
    with _refusals():
        redis.function_load(library_code(), replace=True)


def library_code() -> str:
    """Return the library: the Lua files of this package, joined in order."""
    return "\n".join(_code_of(part) for part in _PARTS)


def _code_of(part: str) -> str:
    code = (resources.files("headrace") / "lua" / f"{part}.lua").read_text("utf-8")
    return f"do\n{code}\nend" if part in _LEAVES else code


def _send(redis: Any, call: Call[T]) -> Any:
    send = redis.fcall_ro if call.read_only else redis.fcall
    return send(f"{LIBRARY}_{call.function}", 1, call.key, *call.args)


def _parsed(call: Call[T], reply: Any) -> T:
    """Read a reply; one that holds what somebody wrote by hand must end no loop of a worker."""
    try:
        return call.parse(reply)
    except (TypeError, ValueError, LookupError) as error:
        raise ProtocolError(f"unreadable reply of {call.function}: {error}") from error


def _is_missing(error: exceptions.ResponseError) -> bool:
    return "Function not found" in str(error)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except REDIS_FAILURES as error:
        wrapped = TransportError(f"Redis: {error or type(error).__name__}")
        wrapped.retryable_later = is_passing(error)
        raise wrapped from error


def is_or_wraps(error: BaseException, *kinds: type[Exception]) -> bool:
    """Whether an error is of one of the kinds, or was raised from one.

    Over a Unix socket, redis-py wraps what the server says to the password.
    """
    return isinstance(error, kinds) or isinstance(error.__cause__, kinds)


def is_untrusted(error: BaseException) -> bool:
    """Whether the server's certificate was refused, which no waiting mends."""
    return isinstance(error.__context__, SSLCertVerificationError)


def is_passing(error: BaseException) -> bool:
    """Whether the same call may succeed later: Redis is out of reach, or said "not now"."""
    if is_or_wraps(error, exceptions.AuthenticationError) or is_untrusted(error):
        return False
    unreachable = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
    broken = (TypeError, AttributeError)
    return isinstance(error, (*unreachable, *broken)) or is_not_now(error)


def is_standstill(error: BaseException) -> bool:
    """Whether Redis said "not now" to whatever writes; at full memory it still renews leases."""
    return is_not_now(error) and not isinstance(error, exceptions.OutOfMemoryError)


def is_not_now(error: BaseException) -> bool:
    """Whether Redis refused for now; nothing ran."""
    return isinstance(error, _NOT_NOW_ERRORS) or str(error).startswith(_NOT_NOW)
