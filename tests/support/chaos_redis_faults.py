"""Faults of Redis: killed and restarted, gone for a while, wiped."""

from __future__ import annotations

import resource
import time
from functools import partial
from pathlib import Path

from headrace.errors import TransportError
from support.chaos_checkers import (
    acknowledged,
    check_resources,
    check_set,
    check_streams,
)
from support.chaos_stand import Stand
from support.chaos_worker_faults import check_everything, kill_points
from support.streams import Asked, check_stream, enqueue, wait_for_ends
from support.workers import LEASE_S

EVERY_SECOND = {"appendonly": "yes", "appendfsync": "everysec"}
RECOVERY_S = 5.0
ENQUEUES_IN_FLIGHT = 128


def kill_redis(stand: Stand) -> None:
    """SIGKILL of the server, again and again, under producers: what it said yes to stays."""
    asked = [Asked(f"r{n}", prompt=(5,), max_tokens=1, seed=n) for n in range(stand.size.requests)]
    stand.start_worker("--max-num-seqs", "64", step_s=0.0)
    points = sorted(stand.draw.randrange(len(asked)) for _ in range(stand.size.rounds))
    downs_s, started_s = [], time.monotonic()
    with stand.load(asked, in_flight=ENQUEUES_IN_FLIGHT, is_read=False):
        for number in points:
            stand.until(partial(has_done, stand, number), timeout_s=600)
            downs_s.append(restart(stand))
    enqueued_s = time.monotonic() - started_s
    driver = stand.driver
    drained_s = wait_until_drained(stand)
    stand.result.measure("kills", len(downs_s))
    stand.result.measure("longest downtime, s", max(downs_s))
    stand.result.measure("all enqueued after, s", enqueued_s)
    stand.result.measure("backlog drained after another, s", drained_s)
    check_set(driver, stand.history, stand.result)
    check_streams(driver, acknowledged(asked, stand.history), stand.result)
    check_resources(driver, stand.result)


def restart_redis(stand: Stand) -> None:
    """SIGTERM or SIGKILL of Redis in mid-stream: a pause, and nothing is granted again."""
    asked = stand.make_requests()
    stand.start_worker(lease_s=LEASE_S)  # grants are counted
    downs_s, recovered_s = [], []
    with stand.load(asked):
        for tokens in kill_points(stand, asked):
            stand.wait_for_tokens(tokens)
            downs_s.append(restart(stand, gently=stand.draw.random() < 0.5))
            recovered_s.append(seconds_to_next_token(stand))
    stand.result.measure("longest downtime, s", max(downs_s))
    stand.result.time("longest pause after it", max(recovered_s), at_most_s=2.0)
    check_everything(stand, asked)
    known = acknowledged(asked, stand.history)
    grants = [stand.driver.status(request.request_id).epoch for request in known]
    stand.result.measure("granted again", sum(epoch > 1 for epoch in grants), at_most=0)


def stop_redis_for_long(stand: Stand) -> None:
    """Redis is gone for many leases and comes back: a pause for everybody, and no more."""
    asked = stand.make_requests()
    worker = stand.start_worker()
    with stand.load(asked):
        stand.wait_for_tokens(kill_points(stand, asked)[0])
        before = memory_mib(worker.child.pid)
        stand.history.note("stop redis", seconds=stand.size.seconds)
        stand.server.kill()
        stand.wait_for_s(stand.size.seconds)
        stand.server.start()
        recovered_s = seconds_to_next_token(stand)
    stand.result.measure(
        "worker has grown by, MiB", memory_mib(worker.child.pid) - before, at_most=64
    )
    stand.result.time("recovery", recovered_s, at_most_s=RECOVERY_S)
    stand.result.measure("workers lost", int(worker.child.poll() is not None), at_most=0)
    check_everything(stand, asked)


def wipe_redis(stand: Stand) -> None:
    """FLUSHALL under running workers: waiters hear that it is lost, and new work runs."""
    stand.start_worker()
    driver = stand.driver
    old = [Asked(f"old{n}", max_tokens=3000, seed=n) for n in range(stand.size.requests)]
    with stand.load(old, in_flight=len(old)):
        stand.wait_for_tokens(len(old))
        stand.history.note("wipe redis")
        driver.client.flushall()
        started_s = time.monotonic()
        enqueue(driver, new := Asked("new"))
        wait_for_ends(driver, new)
        stand.result.time("new work done", time.monotonic() - started_s, at_most_s=5.0)
    stand.result.time("waiters told", time.monotonic() - started_s, at_most_s=10.0)
    check_stream(driver, new)
    errors = [view.error for view in stand.clients.calm.values()]
    told = sum("RequestLost" in error for error in errors)
    stand.result.measure("told that it is lost", told, at_least=len(old))


def fill_redis(stand: Stand) -> None:
    """Redis has no memory left: everybody waits, the full queue drains, and all goes on."""
    asked = stand.make_requests()
    worker = stand.start_worker()
    stalled_s = []
    with stand.load(asked):
        for tokens in kill_points(stand, asked):
            stand.wait_for_tokens(tokens)
            stand.history.note("fill redis", seconds=stand.size.seconds)
            stand.driver.client.config_set("maxmemory", 1)
            stand.wait_for_s(stand.size.seconds)
            stand.driver.client.config_set("maxmemory", 0)
            stalled_s.append(seconds_to_next_token(stand))
    stand.result.time("longest recovery", max(stalled_s), at_most_s=RECOVERY_S)
    stand.result.measure("workers lost", int(worker.child.poll() is not None), at_most=0)
    check_everything(stand, asked)


def restart(stand: Stand, *, gently: bool = False) -> float:
    """End the server and start it again; returns how long it was away, in seconds."""
    stand.history.note("stop redis" if gently else "kill redis", pid=stand.server.pid)
    started_s = time.monotonic()
    if gently:
        stand.server.stop()
    else:
        stand.server.kill()
    stand.server.start()
    return time.monotonic() - started_s


def memory_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def has_done(stand: Stand, number: int) -> bool:
    """Whether so many requests are over for their clients."""
    return stand.clients.num_done >= number


def seconds_to_next_token(stand: Stand) -> float:
    """Wait for a token that no reader has seen; returns how long that took."""
    started_s, seen = time.monotonic(), stand.clients.num_tokens
    stand.until(lambda: stand.clients.num_tokens > seen, timeout_s=60)
    return time.monotonic() - started_s


def wait_until_drained(stand: Stand) -> float:
    """Wait until nothing waits or runs; returns how long that took, in seconds."""
    driver, started_s = stand.driver, time.monotonic()

    def is_idle() -> bool:
        try:
            depth = driver.depth()
        except TransportError as error:  # looked at from outside, without a client's patience
            if not error.retryable_later:
                raise
            return False
        return (depth.queued, depth.running) == (0, 0)

    stand.until(is_idle, timeout_s=900)
    return time.monotonic() - started_s
