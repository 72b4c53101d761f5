"""How the client connects: each setting answers a failure that was measured."""

from __future__ import annotations

from typing import Any

import pytest
import redis
import redis.asyncio

from headrace.connections import (
    BLOCK_MARGIN_S,
    BLOCK_S,
    SYNC_BLOCK_MARGIN_S,
    SYNC_BLOCK_S,
    ConnectionSettings,
)

SETTINGS = ConnectionSettings("redis://user:secret@example.org:6380/3", 16)
MAKERS = ["commands", "reader", "commands_sync", "readers_sync"]


def _options(maker: str) -> dict[str, Any]:
    client: Any = getattr(SETTINGS, maker)()
    options: dict[str, Any] = client.connection_pool.connection_kwargs
    return options


@pytest.mark.parametrize("maker", MAKERS)
def test_address_is_the_urls(maker: str) -> None:
    """Host, port, database and user are those of the URL."""
    options = _options(maker)
    assert (options["host"], options["port"], options["db"]) == ("example.org", 6380, 3)
    assert (options["username"], options["password"]) == ("user", "secret")


@pytest.mark.parametrize("maker", MAKERS)
def test_redis_py_never_tries_twice_by_itself(maker: str) -> None:
    """Calls are repeated by the client's own loops only, which know what may be repeated."""
    assert _options(maker)["retry"].get_retries() == 0


@pytest.mark.parametrize("maker", MAKERS)
def test_replies_are_bytes_in_one_shape(maker: str) -> None:
    """Payloads are binary, and RESP2 and RESP3 servers are read alike."""
    options = _options(maker)
    assert options["decode_responses"] is False
    assert options["legacy_responses"] is False


@pytest.mark.parametrize("maker", MAKERS)
def test_maintenance_notifications_are_off(maker: str) -> None:
    """With them on, redis-py hands out idle connections that the server closed."""
    client: Any = getattr(SETTINGS, maker)()
    assert not client.connection_pool.maint_notifications_enabled()


@pytest.mark.parametrize("maker", ["commands", "reader"])
def test_asyncio_sockets_have_no_timeout_of_their_own(maker: str) -> None:
    """A socket timeout makes redis-py lose cancellations in Python 3.11; the callers bound time."""
    assert _options(maker)["socket_timeout"] is None


def test_blocking_socket_outwaits_redis() -> None:
    """A thread's socket gives up later than the longest block, but soon enough to keep timeouts."""
    assert _options("readers_sync")["socket_timeout"] == SYNC_BLOCK_S + SYNC_BLOCK_MARGIN_S
    assert SYNC_BLOCK_MARGIN_S > 0
    assert BLOCK_MARGIN_S > 0
    assert SYNC_BLOCK_S <= BLOCK_S


@pytest.mark.parametrize("most", [2, 3, 16])
def test_connections_are_shared_out(most: int) -> None:
    """Readers and calls together keep to the bound, and each have at least one."""
    settings = ConnectionSettings("redis://localhost", most)
    assert settings.num_readers >= 1
    assert settings.num_commands >= 1
    assert settings.num_readers + settings.num_commands == most


def test_pools_wait_for_a_free_connection() -> None:
    """A pool that is used up makes its caller wait; it raises no "Too many connections"."""
    asynchronous: Any = SETTINGS.commands().connection_pool
    assert isinstance(asynchronous, redis.asyncio.BlockingConnectionPool)
    for pool in (SETTINGS.commands_sync().connection_pool, SETTINGS.readers_sync().connection_pool):
        assert isinstance(pool, redis.BlockingConnectionPool)
    assert asynchronous.max_connections == SETTINGS.num_commands
