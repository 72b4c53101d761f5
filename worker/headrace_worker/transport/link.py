"""The link to Redis: runs the queue's functions, and says once when Redis goes and comes back."""

from __future__ import annotations

from typing import TypeVar

from redis.asyncio import Redis

from headrace import functions
from headrace.errors import TransportError
from headrace.functions import Call
from headrace_worker import logs

T = TypeVar("T")


class Link:
    """Every method raises TransportError; callers try again later, with backoff."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.is_connected = True  # by the last call's word
        self._log = logs.get_logger()

    async def run(self, call: Call[T]) -> T:
        """Run one function of the queue."""
        try:
            result = await functions.run(self.redis, call)
        except TransportError as error:
            self.lost(error)
            raise
        self.found()
        return result

    def lost(self, error: Exception) -> None:
        """Take note of a failed call; logged when it is the first."""
        if self.is_connected:
            self.is_connected = False
            self._log.warning(logs.REDIS_DISCONNECTED, error=str(error))

    def found(self) -> None:
        """Take note of a call that worked; logged when it is the first after a failure."""
        if not self.is_connected:
            self.is_connected = True
            self._log.info(logs.REDIS_RECONNECTED)
