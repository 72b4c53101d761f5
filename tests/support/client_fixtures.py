"""Fixtures of the clients' tests; their folders' test files import them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from headrace.keys import Keys
from headrace.testing import FakeWorker
from headrace.types import Timeout
from support.any_client import FLAVOURS, AnyClient
from support.queue_driver import TENANT

QUICK = Timeout(first_chunk=100.0, between_chunks=100.0, total=110.0, redis=5.0)
"""Long enough for a busy machine, short enough for a broken test."""

Connect = Callable[..., AnyClient]


@pytest.fixture(params=FLAVOURS)
async def connect(
    request: pytest.FixtureRequest, redis_url: str, queue: Keys
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
