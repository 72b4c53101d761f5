"""The red control: the textbook recipe under the same kills must fail the stream checker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from headrace.keys import GROUP
from support.chaos_checkers import wrong_streams
from support.chaos_stand import Stand
from support.chaos_worker_faults import kill_points
from support.queue_driver import TENANT
from support.streams import Asked
from support.textbook_worker import LANE
from support.workers import SHORT_LEASE_S

TEXTBOOK = Path(__file__).with_name("textbook_worker.py")


def kill_textbook_workers(stand: Stand) -> None:
    """Run the schedule of ``kill_workers`` with the same seed; passes when streams are wrong."""
    asked = stand.make_requests()
    enqueue_by_the_book(stand, asked)
    alive = [start_textbook(stand, number) for number in range(2)]
    try:
        for number, tokens in enumerate(kill_points(stand, asked), start=2):
            stand.until(partial(has_tokens, stand, asked, tokens))
            victim = alive.pop(stand.draw.randrange(len(alive)))
            stand.history.note("kill textbook worker", pid=victim.pid)
            end(victim)
            alive.append(start_textbook(stand, number))
        stand.until(partial(is_acknowledged, stand), timeout_s=300)
    finally:
        for worker in alive:
            end(worker)
    wrong = wrong_streams(stand.driver, asked, by_the_book=True)
    stand.result.measure("streams", len(asked))
    stand.result.measure("wrong, as they must be", len(wrong), at_least=1)


def enqueue_by_the_book(stand: Stand, asked: Sequence[Asked]) -> None:
    """Put the payloads into the stream itself, as the recipe has it."""
    lane = stand.keys.lane(LANE, TENANT)
    client = stand.driver.client
    client.xgroup_create(lane, GROUP, id="0", mkstream=True)
    for request in asked:
        client.xadd(lane, {"payload": request.payload})


def start_textbook(stand: Stand, number: int) -> subprocess.Popen[bytes]:
    """Start a worker by the book, with the lease as its idle time."""
    idle_ms = str(round(SHORT_LEASE_S * 1000))
    command = [sys.executable, str(TEXTBOOK), stand.server.url, stand.keys.queue]
    path = {**os.environ, "PYTHONPATH": str(TEXTBOOK.parents[1])}
    return subprocess.Popen([*command, f"w{number}", idle_ms], env=path)


def end(worker: subprocess.Popen[bytes]) -> None:
    """Kill it and wait for its end."""
    worker.kill()
    worker.wait()


def has_tokens(stand: Stand, asked: Sequence[Asked], number: int) -> bool:
    """Whether the token logs hold so many entries: the recipe writes one for each token."""
    pipeline = stand.driver.client.pipeline(transaction=False)
    for request in asked:
        pipeline.xlen(stand.keys.token_log(TENANT, request.request_id))
    return int(sum(pipeline.execute())) >= number


def is_acknowledged(stand: Stand) -> bool:
    """Whether the group has delivered everything and waits for nothing."""
    (group,) = stand.driver.client.xinfo_groups(stand.keys.lane(LANE, TENANT))
    return (group["pending"], group["lag"]) == (0, 0)
