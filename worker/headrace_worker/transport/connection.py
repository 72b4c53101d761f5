"""How the worker reaches Redis, and what it asks of the server before it starts."""

from __future__ import annotations

import asyncio
from types import TracebackType

import redis.exceptions as redis_errors
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig

from headrace.errors import ConfigurationError, TransportError
from headrace.functions import is_or_wraps, is_passing, is_untrusted
from headrace.redis_url import RedisUrl

COMMAND_TIMEOUT_S = 5.0
TIMEOUTS_PER_LEASE = 4  # with a short lease a lost reply must be noticed sooner
SAFE_POLICY = "noeviction"


class Connections:
    """Two clients of one server, open inside the context."""

    def __init__(self, url: str, lease_s: float) -> None:
        self.command_timeout_s = min(COMMAND_TIMEOUT_S, lease_s / TIMEOUTS_PER_LEASE)
        self.commands = _open(url, self.command_timeout_s)
        self.blocking = _open(url, self.command_timeout_s)  # for reads that wait, and for hints

    async def __aenter__(self) -> Connections:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.commands.aclose()
        await self.blocking.aclose()


async def check_server(redis: Redis) -> tuple[str, ...]:
    """Return warnings about the server.

    Raises ConfigurationError for a login that is refused, for a certificate that is not to be
    trusted, and for an eviction policy under which requests vanish; TransportError when the server
    cannot be reached.
    """
    try:
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            policy = await _read_config(redis, "maxmemory-policy")
            append_only = await _read_config(redis, "appendonly")
    except (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError) as error:
        if is_or_wraps(error, redis_errors.AuthenticationError):
            raise ConfigurationError(f"Redis refuses the login: {error}") from error
        if is_untrusted(error):
            raise ConfigurationError(f"Redis cannot be trusted: {error}") from error
        raise TransportError(f"Redis is unreachable: {error}") from error
    if policy not in (None, SAFE_POLICY):
        raise ConfigurationError(
            f"Redis has maxmemory-policy {policy!r}, under which queued requests vanish without a"
            f" word; set it to {SAFE_POLICY!r}"
        )
    return tuple(_warnings(policy, append_only))


def _warnings(policy: str | None, append_only: str | None) -> list[str]:
    warnings = []
    if policy is None:
        warnings.append(f"CONFIG is refused: make sure that maxmemory-policy is {SAFE_POLICY}")
    if append_only == "no":
        warnings.append("appendonly is off: a restart of Redis loses the queue")
    return warnings


async def _read_config(redis: Redis, name: str) -> str | None:
    """Return a server setting; None where a managed Redis does not tell."""
    try:
        answer = await redis.config_get(name)
    except redis_errors.ResponseError as error:
        if is_passing(error):
            raise TransportError(f"Redis: {error}") from error
        return None
    values = {_text(key): _text(value) for key, value in answer.items()}
    return values.get(name)


def _text(value: bytes | str | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _open(url: str, connect_timeout_s: float) -> Redis:
    """Return a client that never tries twice by itself: the caller knows what may be repeated.

    Its sockets have no timeout: with one, redis-py sends by way of asyncio.wait_for, which in
    Python 3.11 loses a cancellation now and then. Callers bound each command with asyncio.timeout.
    """
    address = RedisUrl.parse(url)
    return Redis.from_url(
        address.url,
        decode_responses=False,
        legacy_responses=False,
        socket_timeout=None,
        socket_connect_timeout=connect_timeout_s,
        retry=Retry(NoBackoff(), 0),
        # With these on, redis-py hands out idle connections that the server has closed.
        maint_notifications_config=MaintNotificationsConfig(enabled=False),
        **address.asyncio_options(),
    )
