"""One read over many token logs: the command, its two runners, and the shape of the reply."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import redis
import redis.asyncio
from redis import exceptions

from headrace.assembly import LogAssembly
from headrace.functions import is_or_wraps

ENTRIES_PER_READ = 64
"""Most entries that one read takes from one log."""

Entries = list[tuple[bytes, Mapping[bytes, bytes]]]


async def read_logs(
    connection: redis.asyncio.Redis, logs: Iterable[LogAssembly], block_s: float | None
) -> list[tuple[LogAssembly, Entries]]:
    """Return the entries of each log that has any; ``block_s`` None does not wait.

    Raises redis-py's errors.
    """
    groups = _by_key(logs)
    execute: Any = connection.execute_command
    return _pairs(groups, await execute(*_command(groups, block_s)))


def read_logs_sync(
    connection: redis.Redis, logs: Iterable[LogAssembly], block_s: float | None
) -> list[tuple[LogAssembly, Entries]]:
    """Do what ``read_logs`` does, on a blocking connection."""
    groups = _by_key(logs)
    execute: Any = connection.execute_command
    return _pairs(groups, execute(*_command(groups, block_s)))


def is_refusal(error: Exception) -> bool:
    """Whether a read will fail for ever: wrong password, no permission, wrong type of key."""
    refused = (exceptions.AuthenticationError, exceptions.NoPermissionError)
    return is_or_wraps(error, *refused) or str(error).startswith("WRONGTYPE")


def _by_key(logs: Iterable[LogAssembly]) -> dict[str, list[LogAssembly]]:
    """Group logs that are read by several streams: Redis shall send each key once."""
    groups: dict[str, list[LogAssembly]] = {}
    for log in logs:
        groups.setdefault(log.log_key, []).append(log)
    return groups


def _command(groups: Mapping[str, list[LogAssembly]], block_s: float | None) -> list[str | int]:
    # BLOCK 0 would wait for ever.
    block: list[str | int] = [] if block_s is None else ["BLOCK", max(1, round(block_s * 1000))]
    cursors = [min(logs, key=lambda log: log.num_tokens).cursor for logs in groups.values()]
    return ["XREAD", "COUNT", ENTRIES_PER_READ, *block, "STREAMS", *groups, *cursors]


def _pairs(
    groups: Mapping[str, list[LogAssembly]], reply: Mapping[bytes, Entries]
) -> list[tuple[LogAssembly, Entries]]:
    return [(log, entries) for key, entries in reply.items() for log in groups[key.decode()]]
