"""Fixtures that every test may use: both servers, a queue of its own, and a check for leaks."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterator

import hypothesis
import pytest
from redis.asyncio import Redis, from_url
from redis.maint_notifications import MaintNotificationsConfig

from headrace.keys import Keys
from support.key_leaks import find_leaks
from support.servers import KINDS, Server, binary_of

# Read when Triton is imported: its kernels then run on the CPU, and need no GPU and no driver.
os.environ.setdefault("TRITON_INTERPRET", "1")

# In a shell's background Ctrl-C is ignored, also by every command that a test would interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine an example takes longer than Hypothesis allows it: a fifth of a second.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Callable[[str], Server]]:
    """Start each kind of server once a session, when the first test asks for it."""
    servers: dict[str, Server] = {}

    def get(kind: str) -> Server:
        if kind not in servers:
            servers[kind] = Server(kind)
            servers[kind].start()
        return servers[kind]

    yield get
    for server in servers.values():
        server.close()


@pytest.fixture(params=KINDS)
def server(
    request: pytest.FixtureRequest, shared_server: Callable[[str], Server]
) -> Iterator[Server]:
    """Give an empty server, Redis and Valkey in turn; afterwards no key may be left for ever.

    A test that needs only one of them says
    ``@pytest.mark.parametrize("server", ["valkey"], indirect=True)``.
    """
    if binary_of(request.param) is None:
        pytest.skip(f"{request.param}-server is not installed on this machine")
    server = shared_server(request.param)
    with server.connect() as client:
        client.flushall()
        yield server
        leaks = find_leaks(client)
        client.flushall()
    assert not leaks, f"keys without a TTL: {leaks}"


@pytest.fixture
def redis_url(server: Server) -> str:
    """Give the address of the server."""
    return server.url


@pytest.fixture
async def redis(server: Server) -> AsyncIterator[Redis]:
    """Give an async client with the options that the project uses."""
    client = open_client(server.url)
    yield client
    await client.aclose()


@pytest.fixture
def queue() -> Keys:
    """Give the keys of a queue that no other test uses."""
    return Keys(f"test-{uuid.uuid4().hex[:12]}")


def open_client(url: str) -> Redis:
    """Return an async client with the options that the project uses."""
    return from_url(
        url,
        decode_responses=False,
        legacy_responses=False,
        maint_notifications_config=MaintNotificationsConfig(enabled=False),
    )
