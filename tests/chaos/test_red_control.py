"""The stream checker sees a wrong stream: the textbook recipe fails where our worker does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.keys import GROUP
from support.queue_driver import TENANT, QueueDriver
from support.servers import Server
from support.streams import Asked, check_answer
from support.textbook_worker import LANE
from support.waiting import eventually
from support.worker_fixtures import ON_VALKEY

TEXTBOOK = Path(__file__).parents[1] / "support" / "textbook_worker.py"
IDLE_MS = 60_000  # nothing is taken from a worker that lives
ASKED = [Asked(f"r{n}", max_tokens=40 + n, seed=n) for n in range(8)]


@ON_VALKEY
def test_the_textbook_worker_passes_when_nothing_goes_wrong(
    driver: QueueDriver, server: Server
) -> None:
    """Undisturbed, its streams are exact: what fails below is the recipe, not the harness."""
    enqueue_by_the_book(driver)
    with textbook_worker(driver, server, "w1"):
        wait_for_all_ends(driver)
    for request in ASKED:
        check_answer(driver, request)
    clean_up(driver)


@contextmanager
def textbook_worker(driver: QueueDriver, server: Server, name: str) -> Iterator[None]:
    """Run one; leaving kills it."""
    command = [sys.executable, str(TEXTBOOK), server.url, driver.keys.queue, name, str(IDLE_MS)]
    path = str(TEXTBOOK.parents[1])
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) as child:
        try:
            yield
        finally:
            child.kill()


def enqueue_by_the_book(driver: QueueDriver) -> None:
    """Put the payload into the stream itself, as the recipe has it."""
    lane = driver.keys.lane(LANE, TENANT)
    driver.client.xgroup_create(lane, GROUP, id="0", mkstream=True)
    for request in ASKED:
        driver.client.xadd(lane, {"payload": request.payload})


def wait_for_all_ends(driver: QueueDriver) -> None:
    """Return when every request was acknowledged."""
    lane = driver.keys.lane(LANE, TENANT)

    def all_acknowledged() -> bool:
        (group,) = driver.client.xinfo_groups(lane)
        return group["pending"] == 0 and group["lag"] == 0

    eventually(all_acknowledged)


def clean_up(driver: QueueDriver) -> None:
    """Delete what the recipe leaves for ever."""
    driver.client.flushall()
