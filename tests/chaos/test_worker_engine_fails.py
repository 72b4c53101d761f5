"""Engines that crash, hang or break while their worker lives: the queue hears of it at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from headrace.errors import ErrorCode
from headrace.types import RequestState
from support.fake_engine import Misfortune
from support.queue_driver import QueueDriver
from support.streams import Asked, check_stream, enqueue, wait_for_ends
from support.worker_fixtures import ON_VALKEY
from support.workers import WorkerFarm

SLOW = ("--step-s", "0.005")
LONG_LEASE = ("--lease-ttl", "600s")  # nothing below may wait for a lease


def poison(misfortune: Misfortune, at: int = 3) -> Asked:
    """Return a request that makes the engine fail when output token ``at`` is due."""
    return Asked("poison", prompt=(5, int(misfortune), at), max_tokens=40)


@ON_VALKEY
def test_a_crash_gives_strikes_to_the_batch_only(driver: QueueDriver, farm: WorkerFarm) -> None:
    """An engine that says who was in its batch spares those that waited."""
    batch = poison(Misfortune.BREAK_ENGINE, at=20)
    enqueue(driver, batch)
    worker = farm.ready(*LONG_LEASE, "--max-num-seqs", "1", engine=SLOW)
    worker.wait_for("request.admitted")
    enqueue(driver, waiting := Asked("waiting"))
    worker.wait_for("engine.step_failed")
    wait_for_ends(driver, waiting)
    check_stream(driver, waiting)
    assert driver.status("waiting").strikes == 0
    assert driver.status("poison").strikes >= 1


@ON_VALKEY
def test_a_killed_engine_gives_no_strike_to_those_that_waited_in_it(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """It had no time to say who was in its batch, but it had said who was not."""
    prompt = (5, Misfortune.WAIT, 3, Misfortune.CRASH, 100)  # it has 97 steps to hear of another
    enqueue(driver, Asked("poison", prompt=prompt, max_tokens=110))
    worker = farm.ready(*LONG_LEASE, "--max-num-seqs", "1", engine=("--step-s", "0.02"))
    worker.wait_for("request.admitted")
    enqueue(driver, waiting := Asked("waiting"))
    worker.wait_for("request.received", count=2)
    farm.open_gate()
    worker.wait_for("engine.step_failed")
    wait_for_ends(driver, waiting)
    check_stream(driver, waiting)
    assert (driver.status("waiting").epoch, driver.status("waiting").strikes) == (2, 0)
    assert driver.status("poison").strikes >= 1


@ON_VALKEY
def test_a_request_that_fails_alone_takes_nobody_along(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """The engine raises for one request: it ends as engine_failure, and the engine goes on."""
    others = [Asked(f"r{n}", max_tokens=40, seed=n) for n in range(4)]
    enqueue(driver, *others, bad := poison(Misfortune.FAIL_REQUEST))
    worker = farm.start(*LONG_LEASE, engine=SLOW)
    wait_for_ends(driver, bad, *others)
    assert driver.end("poison").error_code is ErrorCode.ENGINE_FAILURE
    assert driver.tokens("poison") == bad.answer[:3]
    for request in others:
        check_stream(driver, request)
    assert not worker.events("engine.step_failed")


@ON_VALKEY
def test_a_hung_engine_is_killed_and_its_requests_go_on(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """Past the hang limit the engine is replaced, without waiting for any lease."""
    innocents = [Asked(f"r{n}", max_tokens=60, seed=n) for n in range(3)]
    enqueue(driver, *innocents, bad := poison(Misfortune.HANG))
    worker = farm.start(*LONG_LEASE, "--engine-hang-timeout", "2.5s", engine=SLOW)
    wait_for_ends(driver, bad, *innocents)
    assert driver.end("poison").error_code is ErrorCode.DEAD_LETTERED
    num_stalled = len(worker.events("engine.stalled"))
    assert 3 <= num_stalled <= 5, "the poison has three; a starved engine is replaced, too"
    for request in innocents:
        check_stream(driver, request)


@ON_VALKEY
def test_an_idle_worker_survives_the_death_of_its_engine(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """An engine that is killed from outside is replaced, and the next request is answered."""
    worker = farm.ready(*LONG_LEASE)
    kill_engine_of(worker.child.pid)
    worker.wait_for("engine.step_failed")
    enqueue(driver, asked := Asked("r1"))
    wait_for_ends(driver, asked)
    check_stream(driver, asked)
    assert driver.status("r1").state is RequestState.FINISHED


def kill_engine_of(pid: int) -> None:
    """Kill the child of a worker."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
