"""Faults of workers: killed, told to leave, frozen past their lease."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from support.chaos_checkers import (
    acknowledged,
    check_cost,
    check_dead_letters,
    check_resources,
    check_set,
    check_streams,
    check_views,
)
from support.chaos_ghost import Ghost
from support.chaos_stand import Stand
from support.queue_driver import QueueDriver
from support.streams import Asked, enqueue, wait_for_ends
from support.workers import SHORT_LEASE_S, WorkerProcess

GAP_S = SHORT_LEASE_S + SHORT_LEASE_S / 4 + 1.0  # lease, sweep, and one second for the rest
HANDOVER_S = 2.0
NUM_HAUNTED = 4  # requests that a stale writer goes on writing to
HANG_S = 1.0  # silence after which a worker replaces its engine; the default is a minute
CLAIMS_SHOWN = {"HEADRACE_LOG_LEVEL": "debug"}


def kill_workers(stand: Stand) -> None:
    """SIGKILL a worker at a random token, again and again; others are always alive."""
    asked = stand.make_requests()
    for _ in range(3):
        stand.start_worker()
    struck: list[tuple[float, list[str]]] = []
    with stand.load(asked):
        for tokens in kill_points(stand, asked):
            stand.wait_for_tokens(tokens)
            struck.append(kill_one(stand))
            stand.start_worker()
    measure_gaps(stand, struck)
    stand.result.measure("kills", len(struck))
    check_everything(stand, asked)
    num_takeovers = sum(len(held) for _, held in struck)
    check_cost(stand.tally, asked, stand.result, num_takeovers=num_takeovers)


def terminate_workers(stand: Stand) -> None:
    """SIGTERM under load: what is held is handed over at once, without strikes."""
    asked = stand.make_requests()
    for _ in range(2):
        stand.start_worker(env=CLAIMS_SHOWN)
    slowest_s, late_claims, strikes = 0.0, 0, 0
    with stand.load(asked, in_flight=len(asked)):
        for tokens in kill_points(stand, asked):
            stand.wait_for_tokens(tokens)
            worker = stand.workers.pop(0)
            held = held_by(stand.driver, worker, stand)
            struck = num_strikes(stand.driver, held)
            seconds, claims = terminate(stand, worker)
            strikes += num_strikes(stand.driver, held) - struck
            stand.start_worker(env=CLAIMS_SHOWN)
            slowest_s, late_claims = max(slowest_s, seconds), late_claims + claims
    stand.result.time("slowest hand-over", slowest_s, at_most_s=HANDOVER_S)
    stand.result.measure("claims after the signal", late_claims, at_most=0)
    stand.result.measure("strikes", strikes, at_most=0)
    check_everything(stand, asked)


def freeze_workers(stand: Stand) -> None:
    """SIGSTOP for two to five leases, SIGCONT: what the zombie still writes is refused.

    A ghost held some requests before and writes to them throughout, at its old epoch.
    """
    haunted = [Asked(f"h{n}", max_tokens=600, seed=n) for n in range(NUM_HAUNTED)]
    enqueue(stand.driver, *haunted)
    ghost = Ghost(stand.driver, haunted)
    asked = stand.make_requests()
    for _ in range(2):
        stand.start_worker()
    stand.until(lambda: ghost.is_stale)
    ghost.write()  # at once, while others run what it held: later it might all have ended
    with stand.load(asked):
        for tokens in kill_points(stand, asked):
            ghost.write()
            stand.wait_for_tokens(tokens)
            freeze(stand, stand.draw.choice(stand.workers))
    stand.until(lambda: stand.events("request.dropped"))
    dropped = len(stand.events("request.dropped"))
    stand.result.measure("requests that zombies dropped", dropped, at_least=1)
    ghost.write()
    wait_for_ends(stand.driver, *haunted)
    ghost.tell(stand.result)
    check_streams(stand.driver, haunted, stand.result)
    check_everything(stand, asked)


def stop_engines(stand: Stand) -> None:
    """SIGSTOP of an engine whose worker lives on: past the hang limit it is replaced."""
    asked = stand.make_requests()
    for _ in range(2):
        stand.start_worker("--engine-hang-timeout", f"{HANG_S}s")
    struck: list[tuple[float, list[str]]] = []
    with stand.load(asked):
        for tokens in kill_points(stand, asked):
            stand.wait_for_tokens(tokens)
            struck.append(stop_engine(stand, stand.draw.choice(stand.workers)))
    measure_gaps(stand, struck, at_most_s=HANG_S + SHORT_LEASE_S)
    stand.result.measure("engines replaced", len(stand.events("engine.stalled")), at_least=1)
    check_everything(stand, asked)


def check_everything(stand: Stand, asked: Sequence[Asked]) -> None:
    """Apply the checkers that hold after every fault that loses no data."""
    driver, asked = stand.driver, acknowledged(asked, stand.history)
    check_set(driver, stand.history, stand.result)
    check_streams(driver, asked, stand.result)
    check_views(stand.clients, asked, stand.result)
    check_dead_letters(driver, (), stand.result)
    check_resources(driver, stand.result)


def kill_points(stand: Stand, asked: Sequence[Asked]) -> list[int]:
    """Draw after how many delivered tokens each round strikes: anywhere in the run's first 3/4."""
    tokens = sum(request.max_tokens for request in asked)
    return sorted(
        stand.draw.randrange(1, max(2, tokens * 3 // 4)) for _ in range(stand.size.rounds)
    )


def kill_one(stand: Stand) -> tuple[float, list[str]]:
    """Kill a worker by draw, one that holds something if there is one; returns when, and what."""
    holding = {worker: held_by(stand.driver, worker, stand) for worker in stand.workers}
    victim = stand.draw.choice([w for w in stand.workers if holding[w]] or stand.workers)
    held = holding[victim]
    stand.workers.remove(victim)
    at_s = stand.history.note("kill worker", pid=victim.child.pid, held=len(held))
    victim.kill()
    return at_s, held


def held_by(driver: QueueDriver, worker: WorkerProcess, stand: Stand) -> list[str]:
    """Return the requests that a worker holds."""
    name = f"worker-{stand.farm.workers.index(worker) + 1}"
    views = stand.clients.calm.copy()  # in one go: the clients' thread adds to it
    reading = [rid for rid, view in views.items() if view.end is None]
    return [rid for rid in reading if driver.status(rid).owner == name]


def num_strikes(driver: QueueDriver, request_ids: Sequence[str]) -> int:
    """Count the strikes of some requests: a lease that a busy machine let lapse before is one."""
    return sum(driver.status(request_id).strikes for request_id in request_ids)


def terminate(stand: Stand, worker: WorkerProcess) -> tuple[float, int]:
    """Tell a worker to leave; returns how long it took, and what it claimed afterwards."""
    stand.history.note("terminate worker", pid=worker.child.pid)
    started_s = time.monotonic()
    worker.send(signal.SIGTERM)
    stand.result.expect(worker.wait(15) == 0, "a worker that was told to leave did not exit 0")
    seconds = time.monotonic() - started_s
    names = [event["event"] for event in worker.events()]
    return seconds, names[names.index("worker.draining") :].count("request.received")


def freeze(stand: Stand, worker: WorkerProcess) -> None:
    """Stop a worker while another one takes over what it held."""
    held = held_by(stand.driver, worker, stand)
    pause_s = stand.draw.uniform(2, 5) * SHORT_LEASE_S
    stand.history.note("freeze worker", pid=worker.child.pid, pause_s=pause_s, held=len(held))
    worker.send(signal.SIGSTOP)
    stand.wait_for_s(pause_s)
    worker.send(signal.SIGCONT)


def stop_engine(stand: Stand, worker: WorkerProcess) -> tuple[float, list[str]]:
    """Stop a worker's engine; returns when, and what the worker held."""
    held = held_by(stand.driver, worker, stand)
    pid = worker.child.pid
    at_s = stand.history.note("stop engine", worker=pid, held=len(held))
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        os.kill(int(child), signal.SIGSTOP)
    return at_s, held


def measure_gaps(
    stand: Stand, struck: Sequence[tuple[float, Sequence[str]]], *, at_most_s: float = GAP_S
) -> None:
    """Write down how long the readers of what was held waited for its next token."""
    gaps_s = sorted(
        gap
        for at_s, held in struck
        for request_id in held
        if (gap := stand.clients.calm[request_id].silence_s(at_s)) is not None
    )
    stand.result.measure("streams interrupted", len(gaps_s), at_least=1)
    if gaps_s:
        p99 = gaps_s[min(len(gaps_s) - 1, int(len(gaps_s) * 0.99))]
        stand.result.time("gap p99", p99, at_most_s=at_most_s)
