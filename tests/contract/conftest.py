"""Fixtures for the contract of the queue's functions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import Redis

from headrace.keys import Keys
from support.client_fixtures import any_client, connect, fake_worker, reply_parser
from support.queue_driver import QueueDriver
from support.queue_invariants import check_queue
from support.servers import Server

__all__ = ["any_client", "client", "connect", "driver", "fake_worker", "reply_parser"]


@pytest.fixture
def client(server: Server) -> Iterator[Redis]:
    """Look at the server from outside the functions."""
    with server.connect() as connection:
        yield connection


@pytest.fixture
def driver(client: Redis, queue: Keys) -> Iterator[QueueDriver]:
    """Drive a queue; after the test, its counts, lanes and logs must agree."""
    yield QueueDriver(client, queue)
    check_queue(client, queue)
