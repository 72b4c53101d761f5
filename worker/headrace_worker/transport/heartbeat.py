"""The heartbeat: says that a worker lives, what it serves and how busy it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from headrace import functions
from headrace.errors import TransportError
from headrace.keys import Keys
from headrace_worker.transport.housekeeping import repeat
from headrace_worker.transport.link import Link

BEATS_PER_LEASE = 3
LEASES_PER_LIFE = 4  # without a beat for so long, what the worker left may be cleared away
GOODBYE_LIMIT_S = 0.2


class Heart:
    """Beats until it is cancelled, and then takes leave; ``beat`` raises TransportError."""

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
        self._interval_s = lease_s / BEATS_PER_LEASE
        self._ttl_ms = round(lease_s * 1000 * LEASES_PER_LIFE)
        self._describe = describe
        self._set_depth = set_depth

    async def run(self) -> None:
        """Beat again and again; a worker that leaves in order is not shown as alive any more."""
        try:
            await repeat(self._interval_s, self.beat)
        finally:
            with suppress(TransportError, TimeoutError):
                async with asyncio.timeout(GOODBYE_LIMIT_S):
                    await self._tell(ttl_ms=1)

    async def beat(self) -> None:
        """Tell the queue, and learn how much is in it."""
        await self._tell(self._ttl_ms)
        depth = await self._link.run(functions.depth(self._keys))
        self._set_depth(depth.queued, depth.running)

    async def _tell(self, ttl_ms: int) -> None:
        await self._link.run(
            functions.heartbeat(
                self._keys, worker_id=self._worker_id, info=self._describe(), ttl_ms=ttl_ms
            )
        )
