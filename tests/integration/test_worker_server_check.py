"""What a worker asks of its server before it starts: a login, a policy, persistence."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigurationError, TransportError
from headrace_worker.transport.connection import Connections, check_server
from support.busy_server import SOON, kept_busy
from support.queue_driver import QueueDriver
from support.servers import free_port, running_server
from support.worker_fixtures import ON_VALKEY
from support.workers import LEASE_S


async def test_a_safe_server_is_accepted(connections: Connections) -> None:
    """noeviction is fine; a server without an append-only file is warned about."""
    warnings = await check_server(connections.commands)
    assert len(warnings) == 1
    assert "appendonly" in warnings[0]


async def test_an_evicting_server_is_refused() -> None:
    """The policy is named."""
    with running_server("valkey", {"maxmemory-policy": "volatile-lru"}) as server:
        async with Connections(server.url, LEASE_S) as connections:
            with pytest.raises(ConfigurationError, match="volatile-lru"):
                await check_server(connections.commands)


@ON_VALKEY
async def test_a_server_that_hides_its_settings_is_warned_about(
    driver: QueueDriver, connections: Connections
) -> None:
    """Managed servers refuse CONFIG; then only the operator can know."""
    driver.client.acl_setuser("shy", enabled=True, nopass=True, commands=["+@all", "-config"])
    try:
        await connections.commands.execute_command("AUTH", "shy", "x")  # type: ignore[no-untyped-call]
        (warning,) = await check_server(connections.commands)
        assert "CONFIG" in warning
    finally:
        driver.client.acl_deluser("shy")


@pytest.mark.parametrize("tcp", [False, True])
async def test_a_wrong_password_is_a_wrong_setting(tcp: bool) -> None:
    """Waiting does not mend it, so the worker does not wait, and no password is repeated."""
    with running_server("valkey", tcp=tcp) as server:
        with server.connect() as client:
            client.config_set("requirepass", "right")
        for login in (":wrong-secret@", ""):
            url = server.url.replace("://", f"://{login}", 1)
            async with Connections(url, LEASE_S) as connections:
                with pytest.raises(ConfigurationError, match="refuses the login") as refusal:
                    await check_server(connections.commands)
            assert "wrong-secret" not in str(refusal.value)


async def test_an_unreachable_server_is_a_transport_error() -> None:
    """Nobody listens there."""
    async with Connections(f"redis://127.0.0.1:{free_port()}", LEASE_S) as connections:
        with pytest.raises(TransportError):
            await check_server(connections.commands)


async def test_a_busy_server_is_asked_again() -> None:
    """It has not said what its policy is, so the worker must not start as if that were hidden."""
    with running_server("valkey", SOON) as server:
        async with Connections(server.url, LEASE_S) as connections:
            with kept_busy(server), pytest.raises(TransportError, match="BUSY"):
                await check_server(connections.commands)
            assert "appendonly" in (await check_server(connections.commands))[0]
