"""What any one worker does for all: take back what vanished workers held, and clear up behind them.

The queue's sweep lease lets one worker do it at a time, whoever comes first, in small bites.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from headrace import functions
from headrace.errors import TransportError
from headrace.keys import Keys
from headrace_worker import logs
from headrace_worker.transport.link import Link

REAPS_PER_LEASE = 4
REAP_COUNT = 100  # requests taken back in one bite: who died together is struck together
CLEAN_UP_COUNT = 100  # keys looked at in one bite


class Housekeeper:
    """Every method raises TransportError; ``repeat`` runs them again and again."""

    def __init__(
        self, link: Link, keys: Keys, *, worker_id: str, lease_s: float, max_strikes: int
    ) -> None:
        self._link = link
        self._keys = keys
        self._worker_id = worker_id
        self._lease_ms = round(lease_s * 1000)
        self._max_strikes = max_strikes
        self._log = logs.get_logger()

    async def reap(self) -> None:
        """Take back what vanished holders left, and end what is past its deadline, bite by bite.

        When Redis comes back after a while, every lease may have run out although no holder has
        vanished; so all get the time of a lease to renew before anything is taken from them.
        """
        while not self._link.was_away_within(self._lease_ms / 1000):
            if await self._take_a_bite() < REAP_COUNT:
                return

    async def _take_a_bite(self) -> int:
        """Return how many requests were taken back or ended."""
        reply = await self._link.run(
            functions.reap(
                self._keys,
                worker_id=self._worker_id,
                lease_ms=self._lease_ms,
                count=REAP_COUNT,
                max_strikes=self._max_strikes,
            )
        )
        for dead in reply.dead_lettered:
            self._log.error(logs.REQUEST_DEAD_LETTERED, request_id=dead.request_id)
        return len(reply.requeued) + len(reply.dead_lettered) + len(reply.expired)

    async def clean_up(self) -> None:
        """Delete what nobody needs any more, and repair what was removed by hand."""
        await self._link.run(
            functions.janitor(self._keys, worker_id=self._worker_id, count=CLEAN_UP_COUNT)
        )


async def repeat(interval_s: float, do: Callable[[], Awaitable[None]]) -> None:
    """Do something at once and then again and again, until cancelled."""
    while True:
        with suppress(TransportError):  # logged by the link; the next turn makes up for it
            await do()
        await asyncio.sleep(interval_s)
