"""A worker process from outside: how it starts, what it logs and serves, how it ends."""

from __future__ import annotations

import signal
import socket
from http.client import HTTPConnection

from headrace.types import RequestState
from support.queue_driver import QueueDriver
from support.servers import Server, free_port, running_server
from support.streams import Asked, check_stream, enqueue, skewed, wait_for_ends
from support.waiting import PATIENCE_S, eventually
from support.worker_fixtures import ON_VALKEY
from support.workers import WorkerFarm

FINISHED_FACTS = {
    *("finish_reason", "input_tokens", "cached_tokens", "output_tokens", "queue_s", "ttft_s"),
    *("tpot_s", "e2e_s", "epoch", "strikes", "preemptions"),
}


@ON_VALKEY
def test_start_is_told_with_the_sum_of_the_memory(farm: WorkerFarm) -> None:
    """The log names M, W, k and N_max, under a worker id and a model."""
    worker = farm.ready()
    (started,), (cache,) = worker.events("worker.started"), worker.events("kv_cache.allocated")
    assert started["worker_id"] == "worker-1"
    assert started["model"] == "fake"
    assert worker.events("model.loaded")
    facts = {"memory_bytes", "weights_bytes", "kv_bytes_per_token", "max_kv_tokens"}
    assert facts <= cache.keys()
    assert cache["max_kv_tokens"] == 512 * 16


@ON_VALKEY
def test_the_canonical_line_says_why_a_request_took_its_time(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """request.finished holds all its facts, and its times add up."""
    enqueue(driver, Asked("r1", max_tokens=10))
    worker = farm.start(engine=("--step-s", "0.01"))
    (line,) = worker.wait_for("request.finished")
    assert line.keys() >= FINISHED_FACTS | {"request_id", "worker_id", "model"}
    assert (line["input_tokens"], line["output_tokens"]) == (3, 10)
    assert (line["epoch"], line["strikes"], line["finish_reason"]) == (1, 0, "length")
    assert 0 <= line["queue_s"] <= line["ttft_s"] <= line["e2e_s"]
    assert 0.009 <= line["tpot_s"] <= line["e2e_s"]
    timings = driver.end("r1").timings
    assert timings is not None
    assert abs(timings.e2e_s - line["e2e_s"]) < 1e-5


@ON_VALKEY
def test_a_worker_that_left_is_not_shown_as_alive(driver: QueueDriver, farm: WorkerFarm) -> None:
    """The heartbeat is there while it serves, and gone as soon as it has left in order."""
    worker = farm.ready("--lease-ttl", "60s")  # the last heartbeat would be good for four of these
    heartbeat = driver.keys.worker("worker-1")
    eventually(lambda: driver.client.exists(heartbeat))
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    eventually(lambda: not driver.client.exists(heartbeat))


@ON_VALKEY
def test_a_worker_leaves_when_the_queue_is_empty(driver: QueueDriver, farm: WorkerFarm) -> None:
    """With --exit-when-empty it answers what is there, then exits 0."""
    asked = skewed(10)
    enqueue(driver, *asked)
    worker = farm.start("--exit-when-empty")
    assert worker.wait() == 0
    for request in asked:
        check_stream(driver, request)
    assert worker.events("worker.stopped")


@ON_VALKEY
def test_a_worker_that_leaves_when_empty_waits_for_the_work_of_others(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """While another worker still holds a request, an idle one stays to take it over."""
    asked = Asked("r1")
    enqueue(driver, asked)
    holder = driver.grant("somebody-else")
    worker = farm.ready("--exit-when-empty")
    eventually(lambda: driver.status("r1").state is RequestState.RUNNING)
    driver.release(holder, worker_id="somebody-else")
    assert worker.wait() == 0
    check_stream(driver, asked)


@ON_VALKEY
def test_pages_tell_readiness_and_counts(driver: QueueDriver, farm: WorkerFarm) -> None:
    """/readyz is 503 while the engine loads and 200 afterwards; /metrics counts the answer."""
    port = free_port()
    worker = farm.start("--metrics-port", str(port), engine=("--load-waits",))
    worker.wait_for("worker.started")
    assert get(port, "/healthz")[0] == 200
    assert get(port, "/readyz") == (503, "the engine is not running\n")
    farm.open_gate()
    worker.wait_until_ready()
    eventually(lambda: get(port, "/readyz")[0] == 200)
    enqueue(driver, asked := Asked("r1"))
    wait_for_ends(driver, asked)
    worker.wait_for("request.finished")
    page = get(port, "/metrics")[1]
    assert 'headrace_request_success_total{finished_reason="length"} 1.0' in page
    assert "headrace_generation_tokens_total 20.0" in page


def test_an_unsafe_eviction_policy_is_refused(farm: WorkerFarm) -> None:
    """A server that may evict queued requests is named as the reason, and the exit status is 1."""
    with running_server("valkey", {"maxmemory-policy": "allkeys-lru"}) as unsafe:
        worker = farm.start(url=unsafe.url)
        assert worker.wait() == 1
    assert "allkeys-lru" in worker.events("worker.stopped")[0]["reason"]


@ON_VALKEY
def test_a_server_without_persistence_is_warned_about(farm: WorkerFarm) -> None:
    """The worker starts, and says what a restart of the server would cost."""
    worker = farm.ready()
    assert "appendonly" in worker.events("redis.unsafe")[0]["reason"]


@ON_VALKEY
def test_an_engine_that_cannot_load_ends_the_worker_with_its_reason(farm: WorkerFarm) -> None:
    """The first start is the settings' fault, so it is not tried again."""
    worker = farm.start("--max-num-seqs", "1", env={"HEADRACE_ENGINE_COMMAND": "/bin/false"})
    assert worker.wait() == 1
    assert "exited with status 1 while loading" in worker.events("worker.stopped")[0]["reason"]


@ON_VALKEY
def test_wrong_settings_are_all_named_at_once(farm: WorkerFarm) -> None:
    """Exit status 2, one line for each problem, before anything is connected."""
    worker = farm.start("--max-num-seqs", "none", "--lease-ttl", "soon")
    assert worker.wait() == 2
    assert len(worker.output.splitlines()) == 2
    assert "--max-num-seqs" in worker.output
    assert "--lease-ttl" in worker.output


@ON_VALKEY
def test_a_worker_waits_for_a_server_that_is_not_there_yet(farm: WorkerFarm) -> None:
    """It starts before Redis does, says so once, and goes on when Redis comes."""
    server = Server("valkey")
    try:
        worker = farm.start(url=server.url)
        worker.wait_for("redis.disconnected")
        server.start()
        worker.wait_until_ready()
        assert len(worker.wait_for("redis.reconnected")) == 1
        assert len(worker.events("redis.disconnected")) == 1
    finally:
        server.close()


@ON_VALKEY
def test_a_signal_while_loading_ends_the_worker_in_order(farm: WorkerFarm) -> None:
    """A worker that is told to stop before its model is loaded exits 0 at once."""
    worker = farm.start(engine=("--load-s", "600"))
    worker.wait_for("worker.started")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0


@ON_VALKEY
def test_a_second_signal_ends_the_worker_at_once(driver: QueueDriver, farm: WorkerFarm) -> None:
    """The first waits for requests within the drain time, the second does not."""
    enqueue(driver, Asked("r1", max_tokens=4000))
    worker = farm.start("--drain-timeout", "600s", engine=("--step-s", "0.05"))
    eventually(lambda: driver.status("r1").state is RequestState.RUNNING)
    worker.send(signal.SIGTERM)
    worker.wait_for("worker.draining")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 128 + signal.SIGTERM


@ON_VALKEY
def test_a_worker_in_its_drain_time_finishes_what_it_has(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """With time to drain, the request is finished under its first grant; nothing new is claimed."""
    asked, late = Asked("r1", max_tokens=60), Asked("late")
    enqueue(driver, asked)
    worker = farm.start("--drain-timeout", "20s", engine=("--step-s", "0.01"))
    eventually(lambda: driver.status("r1").num_tokens > 0)
    worker.send(signal.SIGTERM)
    worker.wait_for("worker.draining")
    enqueue(driver, late)
    assert worker.wait() == 0
    check_stream(driver, asked)
    assert driver.status("r1").epoch == 1
    assert driver.status("late").state is RequestState.QUEUED


def get(port: int, path: str) -> tuple[int, str]:
    """Return status and body of a page."""
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.read().decode()


@ON_VALKEY
def test_a_worker_that_still_fetches_its_model_leaves_at_once(farm: WorkerFarm) -> None:
    """SIGTERM does not wait for a hub that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = f"http://127.0.0.1:{silent.getsockname()[1]}"
        online = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HUB_ETAG_TIMEOUT": "600"}
        worker = farm.start(env={"HEADRACE_MODEL": "owner/name", **online})
        silent.settimeout(PATIENCE_S)
        asked, _ = silent.accept()
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
        asked.close()
    assert [e["event"] for e in worker.events()][-1] == "worker.stopped"
    assert "never retrieved" not in worker.output
