"""The link to Redis: runs the queue's functions, and says once when Redis goes and comes back.

Redis can be out of reach, which stops everything, or refuse some things and do others: at full
memory it takes no tokens but renews leases. So what fails is remembered by name, and Redis counts
as back when nothing fails any more, or what was refused has not been tried again for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from redis import exceptions
from redis.asyncio import Redis

from headrace import functions
from headrace.errors import TransportError
from headrace.functions import Call
from headrace_worker import logs

T = TypeVar("T")

REFUSAL_LASTS_S = 10.0  # what nobody has tried since says nothing about Redis any more

_OUT_OF_REACH = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)


class Link:
    """Every method raises TransportError; callers try again later, with backoff."""

    def __init__(
        self, redis: Redis, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.redis = redis
        self.timeout_s = timeout_s  # of one command
        self._clock = clock
        self._back_at: float | None = None  # monotonic second since which leases can be renewed
        self._is_away = False  # out of reach at the last try
        self._refused_at: dict[str, float] = {}  # what Redis refused → monotonic second
        self._log = logs.get_logger()

    @property
    def is_connected(self) -> bool:
        """Whether all that was tried last has worked."""
        return not self._is_away and not self._refused_at

    def was_away_within(self, seconds: float) -> bool:
        """Whether Redis is out of reach, or let no lease be renewed less than so long ago."""
        if self._is_away:
            return True
        return self._back_at is not None and self._clock() - self._back_at < seconds

    async def run(self, call: Call[T]) -> T:
        """Run one function of the queue."""
        try:
            async with asyncio.timeout(self.timeout_s):
                result = await functions.run(self.redis, call)
        except TransportError as error:
            self.lost(call.function, error)
            raise
        except TimeoutError as cause:
            late = TransportError(f"Redis: no answer to {call.function} in {self.timeout_s:g} s")
            late.__cause__ = cause
            self.lost(call.function, late)
            raise late from cause
        self.found(call.function)
        return result

    def lost(self, what: str, error: TransportError) -> None:
        """Take note of a failure; logged when nothing failed before."""
        if self.is_connected:
            self._log.warning(logs.REDIS_DISCONNECTED, during=what, error=str(error))
        if isinstance(error.__cause__, _OUT_OF_REACH):
            self._is_away = True
        else:
            self._refused_at[what] = self._clock()
            if error.__cause__ is not None and functions.is_standstill(error.__cause__):
                self._back_at = self._clock()

    def found(self, what: str) -> None:
        """Take note of a success; logged when nothing fails any more."""
        if self.is_connected:
            return
        now = self._clock()
        if self._is_away:
            self._is_away, self._back_at = False, now
        self._refused_at = {
            name: at
            for name, at in self._refused_at.items()
            if name != what and now - at < REFUSAL_LASTS_S
        }
        if self.is_connected:
            self._log.info(logs.REDIS_RECONNECTED)
