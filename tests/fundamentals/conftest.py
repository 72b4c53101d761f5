"""The fixture of a queue seen from outside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.keys import Keys
from support.queue_driver import QueueDriver
from support.queue_invariants import check_queue
from support.servers import Server


@pytest.fixture
def driver(server: Server, queue: Keys) -> Iterator[QueueDriver]:
    """Drive a queue; after the test, its counts, lanes and logs must agree."""
    with server.connect() as client:
        yield QueueDriver(client, queue)
        check_queue(client, queue)
