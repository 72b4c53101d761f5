"""The heartbeat: says that a worker lives, what it serves and how busy it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace import functions
from headrace.keys import Keys
from headrace_worker.transport.link import Link

BEATS_PER_LEASE = 3
LEASES_PER_LIFE = 4  # without a beat for so long, what the worker left may be cleared away


class Heart:
    """``beat`` raises TransportError."""

    def __init__(
        self,
        link: Link,
        keys: Keys,
        *,
        worker_id: str,
        lease_s: float,
        describe: Callable[[], Mapping[str, str | int]],
        set_depth: Callable[[int, int], None],  # told how many are queued and running
    ) -> None:
        self._link = link
        self._keys = keys
        self._worker_id = worker_id
        self._ttl_ms = round(lease_s * 1000 * LEASES_PER_LIFE)
        self._describe = describe
        self._set_depth = set_depth

    async def beat(self) -> None:
        """Tell the queue, and learn how much is in it."""
        await self._link.run(
            functions.heartbeat(
                self._keys,
                worker_id=self._worker_id,
                info=self._describe(),
                ttl_ms=self._ttl_ms,
            )
        )
        depth = await self._link.run(functions.depth(self._keys))
        self._set_depth(depth.queued, depth.running)
