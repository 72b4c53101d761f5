"""Workers that die, freeze or leave in the middle of a stream: readers see every token once."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace

from headrace.types import RequestState
from support.fake_engine import Misfortune
from support.queue_driver import QueueDriver
from support.streams import (
    Asked,
    check_stream,
    emit_tokens,
    enqueue,
    is_drained,
    skewed,
    wait_for_ends,
)
from support.waiting import eventually
from support.worker_fixtures import ON_VALKEY
from support.workers import SHORT_LEASE, WorkerFarm, WorkerProcess

SLOW = ("--step-s", "0.01")


def test_streams_survive_the_kill_of_their_worker(driver: QueueDriver, farm: WorkerFarm) -> None:
    """SIGKILL in the middle of a batch: a second worker completes every stream, exactly."""
    asked = wait_in_the_middle(Asked(f"r{n}", max_tokens=60 + n, seed=n) for n in range(12))
    first = farm.ready(*SHORT_LEASE, engine=SLOW)
    enqueue(driver, *asked)
    wait_until_some_tokens(driver, asked[0], 10)
    first.kill()
    farm.open_gate()
    second = farm.ready(*SHORT_LEASE, engine=SLOW)
    wait_for_ends(driver, *asked)
    for request in asked:
        check_stream(driver, request)
    reclaimed = second.events("delivery.reclaimed")
    assert any(event["num_tokens"] > 0 for event in reclaimed)
    assert eventually(lambda: is_drained(driver))


@ON_VALKEY
def test_a_frozen_worker_harms_nothing_when_it_wakes(driver: QueueDriver, farm: WorkerFarm) -> None:
    """SIGSTOP past the lease, SIGCONT: its writes are refused, it is good for more (queue B23)."""
    asked = wait_in_the_middle(Asked(f"r{n}", max_tokens=300, seed=n) for n in range(4))
    frozen = farm.ready(*SHORT_LEASE, engine=SLOW)
    enqueue(driver, *asked)
    wait_until_some_tokens(driver, asked[0], 10)
    frozen.send(signal.SIGSTOP)
    farm.open_gate()
    other = farm.ready(*SHORT_LEASE)
    eventually(lambda: driver.status("r0").epoch > 1)
    frozen.send(signal.SIGCONT)
    wait_for_ends(driver, *asked)
    dropped = frozen.wait_for("request.dropped", count=4)
    assert {event["why"] for event in dropped} <= {"FENCED", "DONE", "lease lost"}
    for request in asked:
        check_stream(driver, request)
    other.kill()
    enqueue(driver, late := Asked("late"))
    wait_for_ends(driver, late)
    check_stream(driver, late)
    eventually(lambda: "late" in {e["request_id"] for e in frozen.events("request.finished")})


def test_sigterm_hands_over_at_once(driver: QueueDriver, farm: WorkerFarm) -> None:
    """Exit 0 long before the answers are done, no strikes, no claim after it, streams exact."""
    asked = [Asked(f"r{n}", max_tokens=100, seed=n) for n in range(30)]
    leaving = farm.ready(engine=("--step-s", "0.2"))  # its answers take twenty seconds
    enqueue(driver, *asked)
    wait_until_some_tokens(driver, asked[0], 3)
    leaving.send(signal.SIGTERM)
    assert leaving.wait(15) == 0
    assert driver.depth().running == 0
    (draining,) = leaving.events("worker.draining")
    received = [event["timestamp"] for event in leaving.events("request.received")]
    assert max(received) <= draining["timestamp"]
    farm.ready()
    wait_for_ends(driver, *asked)
    for request in asked:
        check_stream(driver, request)
        assert driver.status(request.request_id).strikes == 0


@ON_VALKEY
def test_workers_with_different_leases_share_a_queue(driver: QueueDriver, farm: WorkerFarm) -> None:
    """The one with the short lease sweeps often, and takes nothing from the one with the long."""
    asked = [Asked(f"r{n}", max_tokens=180, seed=n) for n in range(3)]
    patient = farm.ready("--lease-ttl", "60s", engine=SLOW)
    enqueue(driver, *asked)
    wait_until_some_tokens(driver, asked[0], 1)
    farm.ready("--lease-ttl", "1s")
    wait_for_ends(driver, *asked)
    for request in asked:
        check_stream(driver, request)
        status = driver.status(request.request_id)
        assert (status.epoch, status.strikes) == (1, 0)
    assert not patient.events("request.dropped")


@ON_VALKEY
def test_sigterm_under_load_publishes_what_was_made(driver: QueueDriver, farm: WorkerFarm) -> None:
    """Tokens that the engine has made are in the log when the worker leaves, not made again."""
    asked = Asked("r1", max_tokens=3000)
    leaving = farm.ready("--flush-interval", "60s", "--flush-tokens", "100000", engine=SLOW)
    enqueue(driver, asked)
    wait_until_some_tokens(driver, asked, 1)
    leaving.wait_for("engine.stepped", count=30)
    leaving.send(signal.SIGTERM)
    assert leaving.wait() == 0
    assert driver.status("r1").state is RequestState.QUEUED
    assert driver.status("r1").num_tokens > 5  # the first alone was flushed before
    assert driver.tokens("r1") == asked.answer[: driver.status("r1").num_tokens]


@ON_VALKEY
def test_a_takeover_of_a_finished_answer_only_ends_it(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """All tokens were emitted and the worker died before the end: the next one ends it at once."""
    asked = Asked("r1", max_tokens=20)
    enqueue(driver, asked)
    grant = driver.grant("dead-worker")
    emit_tokens(driver, grant, asked.answer, worker_id="dead-worker")
    driver.release(grant, worker_id="dead-worker")
    worker = farm.ready()
    wait_for_ends(driver, asked)
    check_stream(driver, asked)
    assert not worker.events("request.admitted")


@ON_VALKEY
def test_a_stream_whose_log_is_lost_ends_as_lost(driver: QueueDriver, farm: WorkerFarm) -> None:
    """Tokens that were acknowledged and are gone from Redis are not made up: the end says lost."""
    asked = Asked("r1", max_tokens=20)
    enqueue(driver, asked)
    grant = driver.grant("dead-worker")
    emit_tokens(driver, grant, asked.answer[:5], worker_id="dead-worker")
    driver.release(grant, worker_id="dead-worker")
    driver.client.delete(driver.keys.token_log(grant.tenant, "r1"))
    farm.ready()
    wait_for_ends(driver, asked)
    assert driver.status("r1").error_code == "lost"


@ON_VALKEY
def test_many_skewed_requests_survive_changing_workers(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """Workers come and go, killed, frozen or told to leave; all streams are exact."""
    asked = skewed(150, longest=60)
    workers = [farm.ready(*SHORT_LEASE, engine=("--step-s", "0.02")) for _ in range(3)]
    enqueue(driver, *asked)
    wait_until_some_tokens(driver, asked[0], 1)
    disturb(workers)
    farm.ready(*SHORT_LEASE)
    wait_for_ends(driver, *asked)
    for request in asked:
        check_stream(driver, request)
    assert eventually(lambda: is_drained(driver))


def disturb(workers: list[WorkerProcess]) -> None:
    """Kill one, freeze one for good, tell one to leave."""
    killed, frozen, leaving = workers
    killed.kill()
    frozen.send(signal.SIGSTOP)
    leaving.send(signal.SIGTERM)
    assert leaving.wait() == 0


def wait_in_the_middle(requests: Iterable[Asked]) -> list[Asked]:
    """Let the first of them hold up its engine, after a dozen tokens, until the gate is open."""
    first, *others = requests
    return [replace(first, prompt=(5, Misfortune.WAIT, 12)), *others]


def wait_until_some_tokens(driver: QueueDriver, asked: Asked, count: int) -> None:
    """Return when the log of a request holds so many tokens."""
    eventually(lambda: driver.status(asked.request_id).num_tokens >= count)
