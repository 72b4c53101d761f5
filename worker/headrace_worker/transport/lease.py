"""Leases are kept only while the engine makes progress: a hung device loses its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.errors import TransportError
from headrace.functions import Held

RENEWALS_PER_LEASE = 4
RETRY_S = 0.5  # after a failure: a worker with a shorter lease may sweep as soon as Redis is back


class Renewer(Protocol):
    """What prolongs leases."""

    async def renew(self, held: Sequence[Held]) -> tuple[Held, ...]:
        """Return those that are lost; raises TransportError."""
        ...


class LeaseKeeper:
    """Renews all that is held, four times a lease."""

    def __init__(
        self,
        queue: Renewer,
        *,
        lease_s: float,
        held: Callable[[], Sequence[Held]],
        may_renew: Callable[[], bool],  # whether the engine makes progress
        on_lost: Callable[[Held], None],
    ) -> None:
        self._queue = queue
        self._interval_s = lease_s / RENEWALS_PER_LEASE
        self._held = held
        self._may_renew = may_renew
        self._on_lost = on_lost

    async def run(self) -> None:
        """Renew until cancelled."""
        wait_s = self._interval_s
        while True:
            await asyncio.sleep(wait_s)
            try:
                await self.renew_once()
                wait_s = self._interval_s
            except TransportError:  # logged by the link
                wait_s = min(RETRY_S, self._interval_s)

    async def renew_once(self) -> None:
        """Renew what is held now, if the engine makes progress; raises TransportError."""
        held = self._held()
        if held and self._may_renew():
            for lost in await self._queue.renew(held):
                self._on_lost(lost)
