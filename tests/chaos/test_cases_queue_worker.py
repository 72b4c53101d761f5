"""Known failures of job queues, replayed with worker processes: "(queue Bnn)" names the row."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

from headrace.errors import ErrorCode
from headrace.keys import Keys
from headrace.types import RequestState
from support.fake_engine import Misfortune
from support.queue_driver import QueueDriver
from support.servers import running_server
from support.streams import Asked, check_stream, enqueue, is_drained, wait_for_ends
from support.waiting import eventually
from support.worker_fixtures import ON_VALKEY
from support.workers import WorkerFarm, worker_farm

SLOW = ("--step-s", "0.01")
BACKLOG = int(os.environ.get("HEADRACE_TEST_BACKLOG", "1500"))  # 10,000 was measured, too


@ON_VALKEY
def test_sigterm_hands_everything_over_before_a_long_queue(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """Under a backlog: gone long before its batch is done, no claim, no strikes (queue B15)."""
    worker = farm.ready("--max-num-seqs", "32", engine=("--step-s", "0.1"))  # 40 s a batch
    asked = [Asked(f"r{n}", max_tokens=400, seed=n) for n in range(BACKLOG)]
    enqueue(driver, *asked)
    eventually(lambda: driver.status("r0").num_tokens >= 5)
    worker.send(signal.SIGTERM)
    assert worker.wait(30) == 0
    (leaving,) = worker.events("worker.draining")
    received = [event["timestamp"] for event in worker.events("request.received")]
    assert max(received) <= leaving["timestamp"]
    depth = driver.depth()
    assert (depth.running, depth.queued) == (0, BACKLOG)
    assert {driver.status(f"r{n}").strikes for n in range(64)} == {0}


def test_a_full_memory_stops_claims_and_nobody_has_to_restart(tmp_path: Path) -> None:
    """Filled up under work and freed again: all is answered by the same worker (queue B35)."""
    keys = Keys("full")
    asked = [Asked(f"r{n}", max_tokens=160, seed=n) for n in range(12)]
    asked[0] = replace(asked[0], prompt=(5, Misfortune.WAIT, 3))  # nobody has ended by then
    with (
        running_server("valkey") as server,
        server.connect() as client,
        worker_farm(tmp_path, server.url, keys.queue) as farm,
    ):
        driver = QueueDriver(client, keys)
        enqueue(driver, *asked)
        worker = farm.ready("--max-num-seqs", "4", engine=SLOW)
        eventually(lambda: driver.status("r0").num_tokens > 0)
        client.config_set("maxmemory", "1")
        farm.open_gate()
        worker.wait_for("redis.disconnected")
        assert driver.cancel("r11") is RequestState.CANCELLED
        client.config_set("maxmemory", "0")
        wait_for_ends(driver, *asked)
        for request in asked[:-1]:
            check_stream(driver, request)
        assert worker.child.poll() is None
        assert eventually(lambda: is_drained(driver))


@ON_VALKEY
def test_every_kind_of_failure_has_one_terminal_entry(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """Unreadable, late, refused, failed, poison, cancelled: nobody waits for ever (queue B41)."""
    driver.enqueue("unreadable", payload=b"\xc1")
    enqueue(driver, Asked("late"), ttl_ms=1)
    enqueue(driver, Asked("too-long", prompt=(5,) * 5000))
    enqueue(driver, Asked("failed", prompt=(5, Misfortune.FAIL_REQUEST, 1)))
    enqueue(driver, Asked("poison", prompt=(5, Misfortune.CRASH, 1)))
    enqueue(driver, Asked("cancelled"))
    driver.cancel("cancelled")
    farm.start("--lease-ttl", "60s")
    expected = {
        "unreadable": ErrorCode.UNDECODABLE,
        "late": ErrorCode.DEADLINE_EXCEEDED,
        "too-long": ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        "failed": ErrorCode.ENGINE_FAILURE,
        "poison": ErrorCode.DEAD_LETTERED,
        "cancelled": ErrorCode.CANCELLED,
    }
    wait_for_ends(driver, *map(Asked, expected))
    assert {name: driver.end(name).error_code for name in expected} == expected


@ON_VALKEY
def test_a_rolling_restart_recovers_nothing_that_is_not_lost(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """Each worker replaced in turn under load: no strike, every answer exact (queue B49)."""
    asked = [Asked(f"r{n}", max_tokens=250, seed=n) for n in range(24)]
    workers = [farm.ready(engine=SLOW) for _ in range(2)]
    enqueue(driver, *asked)
    eventually(lambda: driver.status("r0").num_tokens > 0)
    for leaving in workers:
        farm.ready(engine=SLOW)
        leaving.send(signal.SIGTERM)
        assert leaving.wait() == 0
    wait_for_ends(driver, *asked)
    for request in asked:
        check_stream(driver, request)
        assert driver.status(request.request_id).strikes == 0
