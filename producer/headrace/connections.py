"""How the client connects to Redis; each setting prevents a failure that was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.retry
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig

from headrace.errors import ConfigurationError
from headrace.redis_url import RedisUrl

COMMAND_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
HEALTH_CHECK_S = 30

BLOCK_S = 5.0
"""Longest blocking read; a longer wait is several of them."""

BLOCK_MARGIN_S = 5.0
"""A blocking read is given up this much later than Redis should have answered."""

SYNC_BLOCK_S = 2.0
SYNC_BLOCK_MARGIN_S = 3.0
"""The same for the blocking client: in a silent network only the socket timeout ends its wait."""

POOL_WAIT_S = 60.0
"""A call waits this long for a free connection of its pool before it fails."""


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Where Redis is, and how many connections a client may open."""

    url: str = field(repr=False)  # as RedisUrl takes it; it may hold a password
    max_connections: int  # all together, at least 2: half for blocking reads, the rest for calls
    address: RedisUrl = field(init=False)  # the same URL, checked

    def __post_init__(self) -> None:
        most = self.max_connections
        if isinstance(most, bool) or not isinstance(most, int) or most < 2:
            raise ConfigurationError(f"max_connections must be at least 2, not {most!r}")
        object.__setattr__(self, "address", RedisUrl.parse(self.url))

    @property
    def num_readers(self) -> int:
        """Connections for blocking reads."""
        return self.max_connections // 2

    @property
    def num_commands(self) -> int:
        """Connections for short calls."""
        return self.max_connections - self.num_readers

    def commands(self) -> redis.asyncio.Redis:
        """Return the pool for short calls; its user bounds their number and their time."""
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            self.address.url,
            max_connections=self.num_commands,
            timeout=POOL_WAIT_S,
            health_check_interval=HEALTH_CHECK_S,
            **self._asyncio_options(),
        )
        return redis.asyncio.Redis.from_pool(pool)

    def reader(self) -> redis.asyncio.Redis:
        """Return one connection for blocking reads; its user bounds their time."""
        return redis.asyncio.Redis.from_url(
            self.address.url, single_connection_client=True, **self._asyncio_options()
        )

    def commands_sync(self) -> redis.Redis:
        """Return the pool for short calls of a blocking client."""
        pool = redis.BlockingConnectionPool.from_url(
            self.address.url,
            max_connections=self.num_commands,
            timeout=POOL_WAIT_S,
            socket_timeout=COMMAND_TIMEOUT_S,
            health_check_interval=HEALTH_CHECK_S,
            **self._sync_options(),
        )
        return redis.Redis.from_pool(pool)

    def readers_sync(self) -> redis.Redis:
        """Return the pool for the blocking reads of a blocking client."""
        pool = redis.BlockingConnectionPool.from_url(
            self.address.url,
            max_connections=self.num_readers,
            timeout=POOL_WAIT_S,
            socket_timeout=SYNC_BLOCK_S + SYNC_BLOCK_MARGIN_S,
            **self._sync_options(),
        )
        return redis.Redis.from_pool(pool)

    # The client has loops of its own around every call, so redis-py itself never tries twice.
    def _asyncio_options(self) -> dict[str, Any]:
        # With a socket timeout, redis-py sends by way of asyncio.wait_for, which in Python 3.11
        # loses a cancellation now and then. asyncio.timeout around the whole call does not.
        retry = redis.asyncio.retry.Retry(NoBackoff(), 0)
        return _common() | self.address.asyncio_options() | {"socket_timeout": None, "retry": retry}

    def _sync_options(self) -> dict[str, Any]:
        retry = redis.retry.Retry(NoBackoff(), 0)
        return _common() | self.address.sync_options() | {"retry": retry}


def _common() -> dict[str, Any]:
    return {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "decode_responses": False,
        "legacy_responses": False,  # one shape of reply, whatever protocol the server speaks
        # With these notifications on, redis-py 8.1.0 hands out idle connections that are closed.
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }
