"""Connections that ask Redis Sentinel where the master is, when they are made and while they live.

A master that failed over is gone, or refuses to write; then the connection is made anew, and finds
the new master. But Sentinel lets a master that it replaced live on for ten seconds and more, and
that one takes writes which will be lost. So a connection in use asks again every second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.retry
from redis import exceptions
from redis.backoff import NoBackoff

SentinelAddress = tuple[str, int]

SENTINEL_TIMEOUT_S = 1.0
"""Longest wait for one Sentinel before the next is asked."""

RECHECK_S = 1.0
"""A connection in use asks this often whether its server is still the master."""

_NOT_A_MASTER = ("READONLY", "NOREPLICAS", "UNBLOCKED", "MASTERDOWN")
_NOT_A_MASTER_ERRORS = (exceptions.ReadOnlyError, exceptions.MasterDownError)
"""What a server says that was, or may have been, replaced; these errors have lost their word."""

_QUESTION = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME")


class Sentinels:
    """The Sentinels of one service; ``repr`` shows no secret.

    Whoever answered last is asked first. The order is only a hint, so threads may share it.
    """

    def __init__(
        self,
        addresses: Sequence[SentinelAddress],
        service: str,
        *,
        username: str | None = None,
        password: str | None = None,
        tls_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.addresses = tuple(addresses)
        self.service = service
        self.has_tls = tls_options is not None  # None: Sentinels and master are reached in clear
        self._order = list(addresses)
        self._options: dict[str, Any] = {
            "username": username,
            "password": password,
            "socket_connect_timeout": SENTINEL_TIMEOUT_S,
            "ssl": self.has_tls,
            **(tls_options or {}),
        }

    def __repr__(self) -> str:
        hosts = ",".join(f"{host}:{port}" for host, port in self.addresses)
        return f"<Sentinels {hosts} of {self.service!r}>"

    async def find_master(self) -> SentinelAddress:
        """Ask one after the other; raises redis-py's ConnectionError."""
        faults: list[str] = []
        for host, port in self._in_turn():
            client = redis.asyncio.Redis(
                host=host,
                port=port,
                socket_timeout=None,  # see connections.py
                retry=redis.asyncio.retry.Retry(NoBackoff(), 0),
                **self._options,
            )
            try:
                async with asyncio.timeout(SENTINEL_TIMEOUT_S):
                    execute: Any = client.execute_command
                    reply = await execute(*_QUESTION, self.service)
                return self._found((host, port), reply)
            except (exceptions.RedisError, OSError, TimeoutError) as error:
                faults.append(f"{host}:{port}: {error or type(error).__name__}")
            finally:
                await client.aclose()
        raise self._nobody_knows(faults)

    def find_master_sync(self) -> SentinelAddress:
        """Do what ``find_master`` does, for a blocking connection."""
        faults: list[str] = []
        for host, port in self._in_turn():
            client = redis.Redis(
                host=host,
                port=port,
                socket_timeout=SENTINEL_TIMEOUT_S,
                retry=redis.retry.Retry(NoBackoff(), 0),
                **self._options,
            )
            try:
                execute: Any = client.execute_command
                return self._found((host, port), execute(*_QUESTION, self.service))
            except (exceptions.RedisError, OSError) as error:
                faults.append(f"{host}:{port}: {error or type(error).__name__}")
            finally:
                client.close()
        raise self._nobody_knows(faults)

    def _in_turn(self) -> Iterator[SentinelAddress]:
        """Yield each Sentinel once.

        Who is asked goes to the end first: the question may be cancelled, and then the next
        connection shall not be kept waiting by the same one.
        """
        for address in tuple(self._order):
            self._order = [*(other for other in self._order if other != address), address]
            yield address

    def _found(self, address: SentinelAddress, reply: Any) -> SentinelAddress:
        if not reply:
            raise exceptions.ResponseError(f"knows no master {self.service!r}")
        self._order = [address, *(other for other in self._order if other != address)]
        host, port = reply
        return (host.decode() if isinstance(host, bytes) else str(host)), int(port)

    def _nobody_knows(self, faults: Sequence[str]) -> exceptions.ConnectionError:
        return exceptions.ConnectionError(
            f"no Sentinel tells the master {self.service!r}: {'; '.join(faults)}"
        )


class AsyncMaster(redis.asyncio.Connection):
    """A connection to whichever server is the master now."""

    def __init__(self, *, sentinels: Sentinels, **options: Any) -> None:
        super().__init__(**options)
        self._sentinels = sentinels
        self._check_at_s = 0.0  # monotonic

    async def check_health(self) -> None:
        """Leave a server that is no longer the master; called before each command."""
        if time.monotonic() >= self._check_at_s:
            self._check_at_s = time.monotonic() + RECHECK_S
            try:
                is_master = await self._sentinels.find_master() == (self.host, self.port)
            except exceptions.ConnectionError:
                is_master = True  # without Sentinels nothing fails over
            if not is_master:
                await self.disconnect()
                raise _replaced(self.host, self.port)
        await super().check_health()  # type: ignore[no-untyped-call]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Read one reply; a server that no longer acts as a master is left."""
        try:
            return await super().read_response(*args, **options)
        except exceptions.ResponseError as error:
            if _tells_no_master(error):
                await self.disconnect()
            raise

    async def _connect(self) -> None:
        self.host, self.port = await self._sentinels.find_master()
        self._check_at_s = time.monotonic() + RECHECK_S
        await super()._connect()  # type: ignore[no-untyped-call]


class AsyncTlsMaster(AsyncMaster, redis.asyncio.SSLConnection):
    """The same over TLS."""


class Master(redis.Connection):
    """A blocking connection to whichever server is the master now."""

    def __init__(self, *, sentinels: Sentinels, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._sentinels = sentinels
        self._check_at_s = 0.0  # monotonic

    def check_health(self) -> None:
        """Leave a server that is no longer the master; called before each command."""
        if time.monotonic() >= self._check_at_s:
            self._check_at_s = time.monotonic() + RECHECK_S
            try:
                is_master = self._sentinels.find_master_sync() == (self.host, self.port)
            except exceptions.ConnectionError:
                is_master = True  # without Sentinels nothing fails over
            if not is_master:
                self.disconnect()  # type: ignore[no-untyped-call]
                raise _replaced(self.host, self.port)
        super().check_health()  # type: ignore[no-untyped-call]

    def read_response(self, *args: Any, **options: Any) -> Any:
        """Read one reply; a server that no longer acts as a master is left."""
        try:
            return super().read_response(*args, **options)
        except exceptions.ResponseError as error:
            if _tells_no_master(error):
                self.disconnect()  # type: ignore[no-untyped-call]
            raise

    def _connect(self) -> Any:
        self.host, self.port = self._sentinels.find_master_sync()
        self._check_at_s = time.monotonic() + RECHECK_S
        return super()._connect()  # type: ignore[no-untyped-call]


class TlsMaster(Master, redis.SSLConnection):
    """The same over TLS."""


def _replaced(host: str, port: int) -> exceptions.ConnectionError:
    return exceptions.ConnectionError(f"{host}:{port} is no longer the master")


def _tells_no_master(error: exceptions.ResponseError) -> bool:
    return isinstance(error, _NOT_A_MASTER_ERRORS) or str(error).startswith(_NOT_A_MASTER)
