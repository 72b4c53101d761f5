"""Fixtures of the clients' tests; their folders' test files import them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from redis._parsers import _AsyncRESP3Parser, _RESP3Parser
from redis.utils import HIREDIS_AVAILABLE

from headrace.connections import ConnectionSettings
from headrace.keys import Keys
from headrace.testing import FakeWorker
from headrace.types import Timeout
from support.any_client import FLAVOURS, AnyClient
from support.queue_driver import TENANT
from support.servers import Server

QUICK = Timeout(first_chunk=100.0, between_chunks=100.0, total=110.0, redis=30.0)
"""Long enough for a busy machine, short enough for a broken test."""

Connect = Callable[..., AnyClient]
Options = Callable[[ConnectionSettings], dict[str, Any]]


@pytest.fixture
def reply_parser(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have clients of Redis read replies as where hiredis is missing, those of Valkey with it."""
    if server.kind == "valkey":
        assert HIREDIS_AVAILABLE
        return
    for name, parser in (
        ("_asyncio_options", _AsyncRESP3Parser),
        ("_sync_options", _RESP3Parser),
    ):
        options = getattr(ConnectionSettings, name)
        monkeypatch.setattr(ConnectionSettings, name, _with_parser(options, parser))


@pytest.fixture(params=FLAVOURS)
async def connect(
    request: pytest.FixtureRequest, redis_url: str, queue: Keys, reply_parser: None
) -> AsyncIterator[Connect]:
    """Give a maker of clients of the test's queue, AsyncClient and Client in turn."""
    clients: list[AnyClient] = []

    def make(url: str = redis_url, **settings: Any) -> AnyClient:
        settings = {"queue": queue.queue, "tenant": TENANT, "timeout": QUICK, **settings}
        clients.append(AnyClient(request.param, url, **settings))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
def any_client(connect: Connect) -> AnyClient:
    """Give one client with default settings."""
    return connect()


@pytest.fixture
def fake_worker(redis_url: str, queue: Keys) -> Iterator[FakeWorker]:
    """Answer every request with its own prompt."""
    with FakeWorker(redis_url, queue=queue.queue) as worker:
        yield worker


def _with_parser(options: Options, parser: type) -> Options:
    return lambda settings: options(settings) | {"parser_class": parser}
