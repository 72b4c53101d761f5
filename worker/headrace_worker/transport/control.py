"""Hints from clients: a cancel reaches its worker at once, not only with the next emit.

Losing one costs little: the flag in the request's hash is what counts, and every emit answers it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import redis.exceptions as redis_errors
from redis.asyncio import Redis

from headrace.keys import Keys
from headrace_worker.backoff import Backoff

LISTEN_S = 2.0  # longest single wait for a message
FIRST_RETRY_S, MOST_RETRY_S = 0.1, 2.0


class ControlListener:
    """Subscribes to the queue's control channel."""

    def __init__(self, redis: Redis, keys: Keys, on_cancel: Callable[[str, str], None]) -> None:
        self._redis = redis
        self._keys = keys
        self._on_cancel = on_cancel  # told tenant and request id

    async def run(self) -> None:
        """Listen until cancelled; subscribes again after a failure."""
        backoff = Backoff(FIRST_RETRY_S, MOST_RETRY_S)
        while True:
            try:
                await self._listen(backoff)
            except (redis_errors.RedisError, OSError):  # the link tells; hints are only hints
                await asyncio.sleep(backoff.next_delay_s())

    async def _listen(self, backoff: Backoff) -> None:
        async with self._redis.pubsub(ignore_subscribe_messages=True) as channel:
            await channel.subscribe(self._keys.control)
            backoff.reset()
            while True:
                message = await channel.get_message(timeout=LISTEN_S)
                if message is not None:
                    self._take(message["data"])

    def _take(self, data: bytes) -> None:
        tenant, separator, request_id = data.decode("utf-8", "replace").partition(":")
        if separator:
            self._on_cancel(tenant, request_id)
