"""Metrics: vLLM's nouns, one registry a worker, and three pages over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.errors import ConfigurationError
from headrace.types import FinishReason, Timings, Usage
from headrace_worker.engine.messages import SampledToken, StepOutcome
from headrace_worker.serving import http
from headrace_worker.serving.http import MetricsServer
from headrace_worker.serving.metrics import Metrics
from support.waiting import PATIENCE_S

OUTCOME = StepOutcome(
    step=1,
    tokens=(SampledToken(1, 5), SampledToken(2, 6)),
    finished=(),
    failed=(),
    admitted=(),
    preempted=(3,),
    num_running=2,
    num_waiting=1,
    free_blocks=25,
    num_blocks=100,
    num_scheduled_tokens=10,
    num_prefill_tokens=8,
    num_scheduled_seqs=2,
    adds_seen=3,
    step_s=0.01,
)
TIMINGS = Timings(queue_s=1.0, ttft_s=1.5, tpot_s=0.02, e2e_s=3.0)


def _value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"headrace_{name}", labels)


def test_a_step_sets_the_state_of_the_engine() -> None:
    """Running, waiting and KV usage are those of the last step; tokens and preemptions add up."""
    metrics = Metrics()
    metrics.observe_step(OUTCOME)
    metrics.observe_step(OUTCOME)
    assert _value(metrics, "num_requests_running") == 2
    assert _value(metrics, "num_requests_waiting") == 1
    assert _value(metrics, "kv_cache_usage_perc") == pytest.approx(0.75)
    assert _value(metrics, "generation_tokens_total") == 4
    assert _value(metrics, "num_preemptions_total") == 2
    assert _value(metrics, "engine_step_seconds_count") == 2


def test_a_finished_request_is_counted_by_reason_and_measured() -> None:
    """Latencies are sums in seconds, under vLLM's names."""
    metrics = Metrics()
    metrics.observe_first_token(1.5)
    metrics.observe_finished(FinishReason.STOP, Usage(10, 5, 4), TIMINGS)
    assert _value(metrics, "request_success_total", finished_reason="stop") == 1
    assert _value(metrics, "prompt_tokens_total") == 10
    assert _value(metrics, "prompt_tokens_cached_total") == 4
    assert _value(metrics, "time_to_first_token_seconds_sum") == 1.5
    assert _value(metrics, "request_time_per_output_token_seconds_sum") == 0.02
    assert _value(metrics, "request_queue_time_seconds_sum") == 1.0
    assert _value(metrics, "e2e_request_latency_seconds_sum") == 3.0


def test_an_error_is_counted_by_code() -> None:
    """A request that failed before its first token has no time per token."""
    metrics = Metrics()
    timings = Timings(queue_s=0.0, ttft_s=None, tpot_s=None, e2e_s=0.1)
    metrics.observe_finished(FinishReason.ERROR, Usage(0, 0), timings, code="invalid_request")
    assert _value(metrics, "request_failure_total", code="invalid_request") == 1
    assert _value(metrics, "request_time_per_output_token_seconds_count") == 0


def test_the_queue_and_the_rare_events_have_series() -> None:
    """Depth has both states; takeovers and restarts are counted."""
    metrics = Metrics()
    metrics.set_queue_depth(queued=7, running=3)
    metrics.count_reclaimed(2)
    metrics.count_engine_restart()
    assert _value(metrics, "queue_depth", state="queued") == 7
    assert _value(metrics, "queue_depth", state="running") == 3
    assert _value(metrics, "deliveries_reclaimed_total") == 2
    assert _value(metrics, "engine_restarts_total") == 1


def test_two_workers_in_one_process_do_not_share_series() -> None:
    """Each has a registry of its own."""
    one, two = Metrics(), Metrics()
    one.count_engine_restart()
    assert _value(two, "engine_restarts_total") == 0


def test_every_series_has_the_prefix_and_a_text() -> None:
    """The page is readable by Prometheus, and says what each series means."""
    families = [*text_string_to_metric_families(Metrics().render().decode())]
    assert len(families) >= 15
    assert all(f.name.startswith("headrace_") and f.documentation for f in families)


async def _get(server: MetricsServer, request: bytes) -> tuple[int, bytes]:
    """Send raw bytes; return status and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    await writer.drain()
    async with asyncio.timeout(PATIENCE_S):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    assert f"Content-Length: {len(body)}".encode() in head
    return int(head.split()[1]), body


def _server(*unready: str, metrics: Metrics | None = None) -> MetricsServer:
    return MetricsServer(metrics or Metrics(), unready=lambda: unready)


async def test_metrics_are_served_as_text() -> None:
    """/metrics has what the registry has now."""
    metrics = Metrics()
    async with _server(metrics=metrics) as server:
        metrics.count_reclaimed(3)
        status, body = await _get(server, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert status == 200
    assert b"headrace_deliveries_reclaimed_total 3.0" in body


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", 200),
        (b"GET /healthz?verbose=1 HTTP/1.0\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 405),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 10_000, 400),
    ],
)
async def test_every_request_has_an_answer(request_: bytes, status: int) -> None:
    """Good, wrong and broken requests are answered with their status."""
    async with _server() as server:
        assert (await _get(server, request_))[0] == status


async def test_head_has_no_body() -> None:
    """HEAD answers with the length of a body that does not follow."""
    async with _server() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"HEAD /healthz HTTP/1.1\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
    assert answer.endswith(b"\r\n\r\n")
    assert b"Content-Length: 3" in answer


@pytest.mark.parametrize(
    ("unready", "status", "body"),
    [((), 200, b"ok\n"), (("the engine", "Redis"), 503, b"the engine\nRedis\n")],
)
async def test_readiness_says_what_is_missing(
    unready: Sequence[str], status: int, body: bytes
) -> None:
    """/readyz is 200 when work can be done, else 503 with the reasons; the process is healthy."""
    async with _server(*unready) as server:
        assert await _get(server, b"GET /readyz HTTP/1.1\r\n\r\n") == (status, body)
        assert (await _get(server, b"GET /healthz HTTP/1.1\r\n\r\n"))[0] == 200


async def test_a_silent_client_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that sends nothing is closed, and others are served meanwhile."""
    monkeypatch.setattr(http, "_REQUEST_TIMEOUT_S", 0.05)
    async with _server() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert (await _get(server, b"GET /healthz HTTP/1.1\r\n\r\n"))[0] == 200
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        writer.close()


async def test_a_port_that_is_taken_names_its_setting() -> None:
    """Two workers with one port is a common slip."""
    async with _server() as first:
        second = MetricsServer(Metrics(), unready=list, port=first.port)
        with pytest.raises(ConfigurationError, match=f"--metrics-port: 127.0.0.1:{first.port}"):
            await second.start()


async def test_a_stopped_server_is_gone() -> None:
    """Stopping closes the port, may be repeated, and leaves no port to ask for."""
    server = _server()
    await server.start()
    port = server.port
    await server.stop()
    await server.stop()
    with pytest.raises(OSError, match=str(port)):
        await asyncio.open_connection("127.0.0.1", port)
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.port


def test_nothing_runs_while_the_engine_is_down() -> None:
    """The batch and the blocks of an engine that died are gone with it."""
    metrics = Metrics()
    metrics.observe_step(OUTCOME)
    metrics.count_engine_restart()
    assert _value(metrics, "engine_restarts_total") == 1
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert _value(metrics, name) == 0
