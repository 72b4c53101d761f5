"""Faults of the disk below Redis: power that fails before the last writes are on it, and no room.

A kill alone loses nothing, for the kernel still writes what it was given; so the file is cut to
what it was a second before, the most that ``appendfsync everysec`` leaves unwritten. A disk without
room is a limit on the size of files, which Redis meets as a failed write, too, and which needs no
disk of its own.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path

import redis

from support.chaos_checkers import (
    acknowledged,
    check_dead_letters,
    check_resources,
    check_streams,
    check_views,
)
from support.chaos_clients import Clients
from support.chaos_history import Outcome
from support.chaos_redis_faults import RECOVERY_S, seconds_to_next_token
from support.chaos_stand import Stand
from support.chaos_worker_faults import check_everything, kill_points
from support.queue_driver import TENANT, QueueDriver
from support.servers import Server
from support.streams import Asked, wait_for_ends

UNSYNCED_S = 1.0  # of appendfsync everysec
FSYNC_POSTPONED_S = 2.0  # that Redis puts a write off, at most, behind an fsync of a slow disk
FAR_BACK_S = 3.0  # more than both with the slack of a short run: what is as old may not be gone
STEP_S = 0.03  # so that answers are still under way by then
IN_FLIGHT = 16
SAMPLING_S = 0.1  # between an answer, the write before it, and a look at the file
ONE_FILE = {"appendonly": "yes", "appendfsync": "everysec", "auto-aof-rewrite-percentage": "0"}


def cut_power(stand: Stand) -> None:
    """Take the last second of writes from Redis: later enqueues are gone, all else is exact."""
    asked = stand.make_requests()
    for _ in range(2):
        stand.start_worker(step_s=STEP_S)
    cuts: list[tuple[float, float]] = []
    with stand.load(asked, in_flight=IN_FLIGHT):
        for tokens in kill_points(stand, asked):
            stand.wait_for_tokens(tokens)
            stand.until(lambda: seconds_since_first(stand) >= FAR_BACK_S)
            cuts.append(forget_a_second(stand))
    known = acknowledged(asked, stand.history)
    lost = [request for request in known if is_unknown(stand.driver, request)]
    kept = [request for request in known if request not in lost]
    stand.result.measure("power cuts", len(cuts))
    stand.result.measure("acknowledged", len(known))
    stand.result.measure("of these gone", len(lost))
    early_s = max((seconds_too_early(stand, request, cuts) for request in lost), default=0.0)
    stand.result.measure("unsynced, s", max(cut_s - kept_s for kept_s, cut_s in cuts))
    most_s = FSYNC_POSTPONED_S + SAMPLING_S * stand.size.slack
    stand.result.measure("acknowledged before that and gone, s", early_s, at_most=most_s)
    untold = [r.request_id for r in lost if not is_told(stand.clients, r)]
    stand.result.measure("of these untold", len(untold), at_most=0)
    rolled_back = len(stand.events("stream.rolled_back"))
    stand.result.measure("streams rolled back and written again", rolled_back)
    wait_for_ends(stand.driver, *kept, timeout_s=60)
    check_streams(stand.driver, kept, stand.result)
    check_views(stand.clients, kept, stand.result)
    check_dead_letters(stand.driver, (), stand.result)
    check_resources(stand.driver, stand.result)


def fill_disk(stand: Stand) -> None:
    """Redis cannot write its file: it refuses all writes, everybody waits, and all goes on."""
    asked = stand.make_requests()
    worker = stand.start_worker()
    recovered_s, refused = [], 0
    with stand.load(asked):
        for tokens in kill_points(stand, asked):
            stand.wait_for_tokens(tokens)
            stand.history.note("fill disk", seconds=stand.size.seconds)
            limit_files(stand.server, append_only_file(stand.server).stat().st_size)
            stand.until(lambda: refuses_writes(stand.server))
            refused += 1
            stand.wait_for_s(stand.size.seconds)
            limit_files(stand.server, resource.RLIM_INFINITY)
            recovered_s.append(seconds_to_next_token(stand))
    stand.result.measure("times that Redis refused all writes", refused, at_least=1)
    stand.result.time("longest recovery", max(recovered_s), at_most_s=RECOVERY_S)
    stand.result.measure("workers lost", int(worker.child.poll() is not None), at_most=0)
    check_everything(stand, asked)


def forget_a_second(stand: Stand) -> tuple[float, float]:
    """Kill Redis and start it from its file of a second before; returns both moments."""
    path = append_only_file(stand.server)
    kept_s, size = stand.history.now_s, path.stat().st_size
    stand.wait_for_s(UNSYNCED_S)
    cut_s = stand.history.note("cut power", bytes_lost=path.stat().st_size - size)
    stand.server.kill()
    os.truncate(path, size)
    stand.server.start()
    return kept_s, cut_s


def append_only_file(server: Server) -> Path:
    """Return the file that Redis appends its writes to."""
    (path,) = (server.folder / "appendonlydir").glob("*.incr.aof")
    return path


def limit_files(server: Server, num_bytes: int) -> None:
    """Let no file of the server grow beyond a size."""
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def refuses_writes(server: Server) -> bool:
    """Whether the server takes no more writes, because it cannot keep them."""
    with server.connect() as client:
        try:
            client.set("probe", 1, px=1000)
        except redis.ResponseError as error:
            return "MISCONF" in str(error)
    return False


def is_unknown(driver: QueueDriver, request: Asked) -> bool:
    """Whether the queue has never heard of a request, as far as it remembers."""
    return not driver.client.exists(driver.keys.request(TENANT, request.request_id))


def is_told(clients: Clients, request: Asked) -> bool:
    """Whether both readers came to an end: the answer's, or that it is lost."""
    views = (clients.calm[request.request_id], clients.restless[request.request_id])
    return all(view.end is not None or view.error for view in views)


def seconds_since_first(stand: Stand) -> float:
    """Return how long ago the first request was acknowledged; 0 before."""
    ended_s = [
        operation.ended_s
        for operation in list(stand.history.operations)
        if (operation.kind, operation.outcome) == ("enqueue", Outcome.OK)
        and operation.ended_s is not None
    ]
    return stand.history.now_s - min(ended_s) if ended_s else 0.0


def seconds_too_early(stand: Stand, request: Asked, cuts: Sequence[tuple[float, float]]) -> float:
    """Return how long before the second that the next cut took a request was acknowledged."""
    (ended_s,) = (
        operation.ended_s
        for operation in stand.history.operations
        if (operation.kind, operation.request_id) == ("enqueue", request.request_id)
        and operation.outcome is Outcome.OK
        and operation.ended_s is not None
    )
    taken = (kept_s - ended_s for kept_s, cut_s in cuts if cut_s >= ended_s - SAMPLING_S)
    return max(0.0, min(taken, key=abs, default=float("inf")))
