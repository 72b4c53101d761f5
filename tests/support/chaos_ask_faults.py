"""Faults of those who ask: one id from many, producers that die, poison, readers that sleep."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from support.chaos_checkers import (
    acknowledged,
    check_cost,
    check_dead_letters,
    check_resources,
    check_set,
    check_streams,
    check_views,
)
from support.chaos_redis_faults import wait_until_drained
from support.chaos_stand import Stand
from support.chaos_worker_faults import check_everything
from support.fake_engine import Misfortune
from support.queue_driver import TENANT
from support.streams import Asked
from support.workers import LEASE_S

NUM_PRODUCERS = 16
PRODUCER = ("-m", "support.chaos_producer")
MISFORTUNES = (Misfortune.CRASH, Misfortune.BREAK_ENGINE, Misfortune.HANG)
MOST_CRASHES = 3


def enqueue_the_same(stand: Stand) -> None:
    """Sixteen producers enqueue the same ids at once; then one comes with another payload."""
    stand.start_worker(step_s=0.0, lease_s=LEASE_S)  # grants are counted
    asked = stand.make_requests()
    everybody = [stand.new_clients() for _ in range(NUM_PRODUCERS)]
    futures = [stand.begin(clients.submit_all(asked)) for clients in everybody]
    stand.until(lambda: all(future.done() for future in futures), timeout_s=600)
    wait_until_drained(stand)
    made = [Asked(r.request_id, r.prompt, r.max_tokens, r.seed + 1) for r in asked]
    stand.call(stand.clients.submit_all(made))
    conflicts = sum("RequestConflict" in o.error for o in stand.history.operations)
    stand.result.measure("conflicts told", conflicts, at_least=len(asked))
    granted = sum(stand.driver.status(request.request_id).epoch for request in asked)
    stand.result.measure("grants", granted, at_most=len(asked))
    check_streams(stand.driver, asked, stand.result)
    check_cost(stand.tally, asked, stand.result, num_takeovers=0)
    check_resources(stand.driver, stand.result)


def kill_producers(stand: Stand) -> None:
    """SIGKILL of a producer in the middle of its work; another one submits everything again."""
    stand.start_worker(step_s=0.0, lease_s=LEASE_S)  # what is made again is counted
    asked = stand.make_requests()
    killed = 0
    for _ in range(stand.size.rounds):
        producer = start_producer(stand, asked)
        enough = stand.draw.randrange(1, len(asked) // 2)
        stand.until(partial(has_submitted, stand, producer, asked, enough))
        killed += producer.poll() is None
        producer.kill()
        producer.wait()
    stand.call(stand.clients.submit_all(asked))
    wait_until_drained(stand)
    stand.call(stand.clients.read_all(asked))
    stand.result.measure("producers killed at work", killed, at_least=1)
    check_everything(stand, asked)
    check_cost(stand.tally, asked, stand.result, num_takeovers=0)


def poison(stand: Stand) -> None:
    """One request kills, breaks or hangs every engine that runs it, among innocents."""
    stand.start_worker("--max-strikes", "3", "--engine-hang-timeout", "1s", step_s=0.01)
    innocents, guilty = stand.make_requests(), []
    for number in range(stand.size.rounds):
        kind = MISFORTUNES[number % len(MISFORTUNES)]
        place = stand.draw.randrange(len(innocents))
        bad = Asked(f"poison{number}", prompt=(5, kind, 3), max_tokens=40, seed=number)
        guilty.append(bad)
        asked = [
            Asked(f"{r.request_id}-{number}", r.prompt, r.max_tokens, r.seed) for r in innocents
        ]
        before = len(stand.events("engine.step_failed"))
        with stand.load([*asked[:place], bad, *asked[place:]], in_flight=len(asked) + 1):
            pass
        crashes = len(stand.events("engine.step_failed")) - before
        stand.result.measure(f"engines lost to {number}", crashes, at_most=MOST_CRASHES)
        check_views(stand.clients, asked, stand.result)
        check_streams(stand.driver, asked, stand.result)
    check_set(stand.driver, stand.history, stand.result)
    check_dead_letters(stand.driver, [bad.request_id for bad in guilty], stand.result)
    check_resources(stand.driver, stand.result)


def sleep_while_reading(stand: Stand) -> None:
    """Nobody reads while everything is made; memory holds the answers, no more, and waits."""
    stand.start_worker(step_s=0.0)
    asked, client = stand.make_requests(), stand.driver.client
    before = client.info("memory")["used_memory_dataset"]
    with stand.load(asked, is_read=False):
        pass
    wait_until_drained(stand)
    stand.wait_for_s(stand.size.seconds)
    grown = client.info("memory")["used_memory_dataset"] - before
    stand.result.measure("KiB of Redis a request", grown / 1024 / len(asked), at_most=64)
    stand.call(stand.clients.read_all(acknowledged(asked, stand.history)))
    check_everything(stand, asked)


def start_producer(stand: Stand, asked: Sequence[Asked]) -> subprocess.Popen[bytes]:
    """Start a process that submits them and says nothing."""
    words = [
        f"{r.request_id}/{','.join(map(str, r.prompt))}/{r.max_tokens}/{r.seed}" for r in asked
    ]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *PRODUCER, stand.server.url, stand.keys.queue, *words]
    return subprocess.Popen(command, env=path)


def has_submitted(
    stand: Stand, producer: subprocess.Popen[bytes], asked: Sequence[Asked], enough: int
) -> bool:
    """Whether the queue has heard of enough of them, or the producer is done."""
    driver = stand.driver
    pipeline = driver.client.pipeline(transaction=False)
    for request in asked:
        pipeline.exists(driver.keys.request(TENANT, request.request_id))
    return producer.poll() is not None or int(sum(pipeline.execute())) >= enough
