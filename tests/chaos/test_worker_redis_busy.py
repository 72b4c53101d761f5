"""Redis that is busy with somebody else's script for longer than a lease: the worker waits."""

from __future__ import annotations

from pathlib import Path

from headrace.keys import Keys
from support.busy_server import SOON, kept_busy
from support.queue_driver import QueueDriver
from support.servers import running_server
from support.streams import Asked, check_stream, enqueue, wait_for_ends
from support.waiting import eventually
from support.workers import seconds_since, worker_farm

LEASE_S = 3.0  # long enough for a busy machine, short enough to be waited for


def test_a_busy_redis_is_a_pause(tmp_path: Path) -> None:
    """No lease can be renewed and none is taken away; nothing is granted again or struck."""
    keys = Keys("busy")
    asked = [Asked(f"r{n}", max_tokens=100, seed=n) for n in range(4)]
    with (
        running_server("valkey", SOON) as server,
        server.connect() as client,
        worker_farm(tmp_path, server.url, keys.queue) as farm,
    ):
        driver = QueueDriver(client, keys)
        lease = ("--lease-ttl", f"{LEASE_S}s")
        workers = [farm.ready(*lease, engine=("--step-s", "0.01")) for _ in range(2)]
        enqueue(driver, *asked)
        eventually(lambda: driver.status("r0").num_tokens > 5)
        with kept_busy(server):
            gone = [worker.wait_for("redis.disconnected")[0] for worker in workers]
            eventually(lambda: min(map(seconds_since, gone)) > 1.2 * LEASE_S)
        wait_for_ends(driver, *asked)
        for request in asked:
            check_stream(driver, request)
            status = driver.status(request.request_id)
            assert (status.epoch, status.strikes) == (1, 0)
        assert [worker.child.poll() for worker in workers] == [None, None]
