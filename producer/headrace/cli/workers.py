"""Who serves a queue: the heartbeats that workers leave in Redis once their model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from redis import exceptions

from headrace.errors import TransportError
from headrace.keys import Keys


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker that is alive."""

    worker_id: str
    seen_s: float  # age of its heartbeat by Redis's clock
    facts: Mapping[str, str]  # what it said of itself then: model, requests held, lease

    @property
    def is_silent(self) -> bool:
        """Whether its last heartbeat is older than its lease: it has died, or hangs."""
        lease_s = self.facts.get("lease_s")
        return lease_s is not None and self.seen_s > float(lease_s)


async def list_workers(client: redis.asyncio.Redis, keys: Keys) -> tuple[WorkerInfo, ...]:
    """Return the workers whose heartbeat has not run out, by name; raises TransportError."""
    try:
        seconds, microseconds = await client.time()
        members: Any = await client.zrange(keys.workers, 0, -1)
        names = [name.decode() for name in members]
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.hgetall(keys.worker(name))
        hashes: list[dict[bytes, bytes]] = await pipeline.execute() if names else []
    except (exceptions.RedisError, OSError) as error:
        raise TransportError(f"Redis: {error or type(error).__name__}") from error
    now_ms = seconds * 1000 + microseconds // 1000
    found = [_info(name, fields, now_ms) for name, fields in zip(names, hashes, strict=True)]
    return tuple(sorted(filter(None, found), key=lambda worker: worker.worker_id))


def _info(name: str, fields: dict[bytes, bytes], now_ms: int) -> WorkerInfo | None:
    # A name outlives its heartbeat until the janitor comes by.
    facts: dict[str, Any] = {k.decode(): v.decode(errors="replace") for k, v in fields.items()}
    seen_ms = facts.pop("seen_ms", None)
    if seen_ms is None:
        return None
    visible = {name: value for name, value in facts.items() if not name.startswith("_")}
    return WorkerInfo(name, max(0.0, (now_ms - int(seen_ms)) / 1000), visible)
