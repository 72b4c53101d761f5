"""Fixtures of the tests that start worker processes; their folders' conftest files import them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from headrace.keys import Keys
from headrace_worker.transport.connection import Connections
from headrace_worker.transport.link import Link
from headrace_worker.transport.queue import RedisQueue
from support.queue_driver import QueueDriver
from support.servers import Server
from support.workers import LEASE_S, WorkerFarm, worker_farm

ON_VALKEY = pytest.mark.parametrize("server", ["valkey"], indirect=True)
"""For tests whose subject is the worker, not the server."""


def queue_over(connections: Connections, queue: Keys) -> RedisQueue:
    """Return the queue as worker w1 sees it."""
    link = Link(connections.commands, connections.command_timeout_s)
    return RedisQueue(
        link, connections.blocking, queue, worker_id="w1", lease_s=LEASE_S, max_strikes=3
    )


@pytest.fixture
def driver(server: Server, queue: Keys) -> Iterator[QueueDriver]:
    """Give the queue, seen from outside."""
    with server.connect() as client:
        yield QueueDriver(client, queue)


@pytest.fixture
def farm(tmp_path: Path, server: Server, queue: Keys) -> Iterator[WorkerFarm]:
    """Give a starter of workers, none of which outlives the test."""
    with worker_farm(tmp_path, server.url, queue.queue) as farm:
        yield farm


@pytest.fixture
async def connections(server: Server) -> AsyncIterator[Connections]:
    """Give the worker's two clients."""
    async with Connections(server.url, lease_s=LEASE_S) as connections:
        yield connections
