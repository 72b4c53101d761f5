"""Failover by Sentinels under load: what was acknowledged and is gone is counted, twice.

Replication runs behind the answers, so a master that dies may take acknowledged requests with it.
A producer that waits until both replicas have its request (WAIT) loses nothing: the second count.
"""

from __future__ import annotations

import threading
import time

import redis

from headrace.errors import TransportError
from support.chaos_checkers import acknowledged, check_streams, check_views
from support.chaos_clients import Clients
from support.chaos_disk_faults import is_told, is_unknown
from support.chaos_stand import Stand
from support.chaos_worker_faults import kill_points
from support.queue_driver import QueueDriver
from support.sentinel import NUM_REPLICAS, Replicated, replicated
from support.servers import Server
from support.streams import Asked, enqueue, wait_for_ends

REPLICATED_MS = 1000
IN_FLIGHT = 64


class CarefulProducer:
    """Enqueues one request after another, from a thread, until the master is gone."""

    def __init__(self, driver: QueueDriver, prefix: str) -> None:
        self.acknowledged: list[Asked] = []  # and replicated
        self._driver = driver
        self._prefix = prefix
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until it has noticed."""
        self._thread.join(timeout=30)

    def _run(self) -> None:
        number = 0
        while True:
            number += 1
            request = Asked(f"{self._prefix}{number}", max_tokens=2, seed=number)
            try:
                enqueue(self._driver, request)
                if self._driver.client.wait(NUM_REPLICAS, REPLICATED_MS) == NUM_REPLICAS:
                    self.acknowledged.append(request)
            except (redis.RedisError, TransportError):
                return


def fail_over(stand: Stand) -> None:
    """Kill the master in mid-stream, again and again, each time of a set of its own."""
    took_s: list[float] = []
    careful: list[Asked] = []
    known: list[Asked] = []
    lost: list[Asked] = []
    for number in range(stand.size.rounds):
        with replicated(stand.server.kind) as watched:
            clients = stand.new_clients(watched.url)
            asked = stand.make_requests(stand.size.requests // stand.size.rounds, f"f{number}-")
            producer, new, seconds = strike(stand, watched, clients, asked, f"safe{number}-")
            took_s.append(seconds)
            with new.connect() as client:
                driver = QueueDriver(client, stand.keys)
                there = acknowledged(asked, stand.history)
                gone = [request for request in there if is_unknown(driver, request)]
                known, lost = [*known, *there], [*lost, *gone]
                careful += producer.acknowledged
                check_rest(stand, driver, clients, there, gone, producer)
    stand.result.measure("failovers", len(took_s))
    stand.result.measure("longest until a token came again, s", max(took_s))
    stand.result.measure("acknowledged", len(known))
    stand.result.measure("of these gone", len(lost))
    stand.result.measure("acknowledged and replicated", len(careful), at_least=1)


def strike(
    stand: Stand, watched: Replicated, clients: Clients, asked: list[Asked], prefix: str
) -> tuple[CarefulProducer, Server, float]:
    """Kill the master in mid-stream; returns the new one, and how long tokens stayed away."""
    worker = stand.start_worker(url=watched.url)
    master = watched.servers[0]
    with master.connect() as client:
        with stand.load(asked, clients=clients, in_flight=IN_FLIGHT):
            producer = CarefulProducer(QueueDriver(client, stand.keys), prefix)
            tokens = kill_points(stand, asked)[0]
            stand.until(lambda: clients.num_tokens >= tokens and producer.acknowledged)
            stand.history.note("kill master", port=master.port)
            started_s, seen = time.monotonic(), clients.num_tokens
            master.kill()
            new = watched.wait_for_failover(master)
            stand.until(lambda: clients.num_tokens > seen)
            took_s = time.monotonic() - started_s
        producer.join()
    stand.workers.remove(worker)
    worker.kill()
    return producer, new, took_s


def check_rest(
    stand: Stand,
    driver: QueueDriver,
    clients: Clients,
    there: list[Asked],
    gone: list[Asked],
    producer: CarefulProducer,
) -> None:
    """Whatever is not gone is exact, who asked for the rest is told, and care has paid."""
    kept = [request for request in there if request not in gone]
    missing = [r.request_id for r in producer.acknowledged if is_unknown(driver, r)]
    stand.result.expect(not missing, f"replicated and gone: {missing}")
    untold = [request.request_id for request in gone if not is_told(clients, request)]
    stand.result.expect(not untold, f"gone, and nobody was told: {untold}")
    wait_for_ends(driver, *kept, timeout_s=60)
    check_streams(driver, kept, stand.result)
    check_views(clients, kept, stand.result)
