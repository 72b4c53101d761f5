"""A soak: faults by draw for as long as asked, and resources back at their baseline afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from support.chaos_checkers import acknowledged
from support.chaos_redis_faults import memory_mib, wait_until_drained
from support.chaos_stand import Stand
from support.chaos_worker_faults import check_everything, kill_one
from support.servers import free_port
from support.streams import Asked
from support.tcp_proxy import TcpProxy
from support.waiting import PATIENCE_S, eventually
from support.workers import SHORT_LEASE_S, WorkerProcess

BATCH = 40  # requests between two faults
TOLERANCE = 1.05
POOL = 64  # connections that a pool keeps from its busiest moment
NOISE = {  # beside the tolerance: what allocators keep for themselves, workers not yet forgotten
    "keys": 3,
    "live workers": 3,
    "Redis, MiB": 3,
    "worker, MiB": 3,
    "its engine, MiB": 3,
    "files of the worker": POOL,
    "files of the clients": POOL,
}


def soak(stand: Stand) -> None:
    """Kill, freeze, reset and cut replies by draw; measure before and after, at rest."""
    proxy, port = stand.proxy(), free_port()
    survivor = stand.start_worker("--metrics-port", str(port), url=proxy.url)
    stand.start_worker()
    warm = run_batch(stand, "warm")
    before = at_rest(stand, survivor, port, warm)
    until_s, number = stand.history.now_s + stand.size.seconds, 0
    while stand.history.now_s < until_s:
        name = f"s{number}-"
        with stand.load(asked := stand.make_requests(BATCH, name)):
            stand.wait_for_tokens(stand.clients.num_tokens + 50)
            disturb(stand, proxy, survivor)
        number += 1
        check_and_forget(stand, asked)
    after = at_rest(stand, survivor, port, [])
    stand.result.measure("batches of 40", number, at_least=1)
    for what, value in after.items():
        most = before[what] * TOLERANCE + NOISE.get(what, 0)
        stand.result.measure(f"{what}, from {before[what]:.4g}", value, at_most=most)


def run_batch(stand: Stand, prefix: str) -> list[Asked]:
    """Let the system warm up, so that the baseline is that of a system at work."""
    with stand.load(asked := stand.make_requests(BATCH, prefix)):
        pass
    return asked


def disturb(stand: Stand, proxy: TcpProxy, survivor: WorkerProcess) -> None:
    """Do one thing to the system, by draw."""
    match stand.draw.choice(("kill", "freeze", "reset", "lose", "nothing")):
        case "kill":
            stand.workers.remove(survivor)
            kill_one(stand)
            stand.workers.insert(0, survivor)
            stand.start_worker()
        case "freeze":
            frozen = stand.workers[-1]
            frozen.send(signal.SIGSTOP)
            stand.wait_for_s(2 * SHORT_LEASE_S)
            frozen.send(signal.SIGCONT)
        case "reset":
            stand.in_loop(proxy.reset_all)
        case "lose":
            proxy.lose_replies(b"headrace_1_emit", times=2)


def check_and_forget(stand: Stand, asked: Sequence[Asked]) -> None:
    """Check a batch, and forget what this process knows of it; Redis forgets by its TTL."""
    wait_until_drained(stand)
    figures = len(stand.result.figures)
    check_everything(stand, acknowledged(asked, stand.history))
    del stand.result.figures[figures:]
    client = stand.driver.client
    for pattern in ("req", "out"):
        for key in client.scan_iter(f"{stand.keys.base}:{pattern}:*", count=1000):
            client.unlink(key)
    stand.clients.calm.clear()
    stand.clients.restless.clear()
    stand.history.operations.clear()


def at_rest(
    stand: Stand, survivor: WorkerProcess, port: int, warm: Sequence[Asked]
) -> dict[str, float]:
    """Measure what could leak: keys, streams, consumers, memory, open files, KV blocks."""
    if warm:
        check_and_forget(stand, warm)
    client: Any = stand.driver.client
    eventually(partial(is_quiet, stand))
    info = {**client.info("memory"), **client.info("clients")}
    streams = list(client.scan_iter(f"{stand.keys.base}:*", count=1000, _type="stream"))
    groups = [group for key in streams for group in client.xinfo_groups(key)]
    return {
        "keys": client.dbsize(),
        "streams": len(streams),
        "consumers": sum(group["consumers"] for group in groups),
        "pending entries": sum(group["pending"] for group in groups),
        "live workers": client.zcard(stand.keys.workers),
        "Redis, MiB": info["used_memory_dataset"] / 2**20,
        "worker, MiB": memory_mib(survivor.child.pid),
        "its engine, MiB": sum(memory_mib(pid) for pid in children_of(survivor.child.pid)),
        "KV blocks in use, %": 100 * metric(port, "kv_cache_usage_perc"),
        "files of the worker": len(os.listdir(f"/proc/{survivor.child.pid}/fd")),
        "files of the clients": len(list(Path("/proc/self/fd").iterdir())),
    }


def children_of(pid: int) -> list[int]:
    """Return the processes that a process started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def metric(port: int, name: str) -> float:
    """Return a gauge of a worker."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as page:
        lines = page.read().decode().splitlines()
    (line,) = (line for line in lines if not line.startswith("#") and name in line)
    return float(line.split()[-1])


def is_quiet(stand: Stand) -> bool:
    """Whether the queue has forgotten the workers that died."""
    alive = sum(worker.child.poll() is None for worker in stand.farm.workers)
    return int(stand.driver.client.zcard(stand.keys.workers)) <= alive
