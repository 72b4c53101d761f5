"""What a worker counts and measures, under vLLM's nouns and the prefix ``headrace_``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headrace.types import FinishReason, Timings, Usage
from headrace_worker.engine.messages import StepOutcome

# Seconds: from one token of a fast model to a request that waited an hour.
_LATENCY_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0),
)
_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)


class Metrics:
    """All series of one worker, in a registry of its own; any thread may call it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._finished = self._counter("request_success", "Ended requests", ["finished_reason"])
        self._failed = self._counter("request_failure", "Failed requests", ["code"])
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests")
        self._cached_tokens = self._counter(
            "prompt_tokens_cached", "Of these, tokens found in the prefix cache"
        )
        self._generated = self._counter("generation_tokens", "Tokens sampled")
        self._scheduled_tokens = self._counter(
            "scheduled_tokens", "Tokens computed, prefill and decode, over all steps"
        )
        self._scheduled_seqs = self._counter(
            "scheduled_sequences", "Sequences in the batch, summed over all steps"
        )
        self._preemptions = self._counter("num_preemptions", "Sequences sent back to waiting")
        self._reclaimed = self._counter("deliveries_reclaimed", "Requests granted again")
        self._restarts = self._counter("engine_restarts", "Engine processes started again")
        self._running = self._gauge("num_requests_running", "Sequences in the batch")
        self._waiting = self._gauge("num_requests_waiting", "Claimed and not admitted yet")
        self._kv_usage = self._gauge(
            "kv_cache_usage_perc", "Share of KV blocks in use or set aside, 0 to 1"
        )
        self._depth = self._gauge("queue_depth", "Requests in the queue, all workers", ["state"])
        self._queue_time = self._seconds("request_queue_time", "Enqueue to first admission")
        self._ttft = self._seconds("time_to_first_token", "Enqueue to first token")
        self._tpot = self._seconds(
            "request_time_per_output_token", "Mean per output token after the first", _TOKEN_BUCKETS
        )
        self._e2e = self._seconds("e2e_request_latency", "Enqueue to finish")
        self._step = self._seconds("engine_step", "One step of the engine", _TOKEN_BUCKETS)

    def observe_step(self, outcome: StepOutcome) -> None:
        """Take one step of the engine into account."""
        self._generated.inc(len(outcome.tokens))
        self._scheduled_tokens.inc(outcome.num_scheduled_tokens)
        self._scheduled_seqs.inc(outcome.num_scheduled_seqs)
        self._preemptions.inc(len(outcome.preempted))
        self._running.set(outcome.num_running)
        self._waiting.set(outcome.num_waiting)
        self._kv_usage.set(1 - outcome.free_blocks / outcome.num_blocks)
        self._step.observe(outcome.step_s)

    def observe_finished(
        self, reason: FinishReason, usage: Usage, timings: Timings, *, code: str | None = None
    ) -> None:
        """Count one ended request; ``code`` is the error's, when there is one."""
        self._finished.labels(reason.value).inc()
        if code is not None:
            self._failed.labels(code).inc()
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_tokens.inc(usage.cached_tokens)
        self._queue_time.observe(timings.queue_s)
        self._e2e.observe(timings.e2e_s)
        if timings.tpot_s is not None:
            self._tpot.observe(timings.tpot_s)

    def observe_first_token(self, ttft_s: float) -> None:
        """Take a request's first token into account, when it comes."""
        self._ttft.observe(ttft_s)

    def count_reclaimed(self, num_requests: int = 1) -> None:
        """Count requests that were granted before, to whichever worker."""
        self._reclaimed.inc(num_requests)

    def count_engine_restart(self) -> None:
        """Count one more start of the engine process; until it has loaded, nothing runs."""
        self._restarts.inc()
        for gauge in (self._running, self._waiting, self._kv_usage):
            gauge.set(0)

    def set_queue_depth(self, queued: int, running: int) -> None:
        """Set the true counts of the whole queue."""
        self._depth.labels("queued").set(queued)
        self._depth.labels("running").set(running)

    def render(self) -> bytes:
        """Return all series in Prometheus's text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"headrace_{name}", text, labels or [], registry=self.registry)

    def _gauge(self, name: str, text: str, labels: list[str] | None = None) -> Gauge:
        return Gauge(f"headrace_{name}", text, labels or [], registry=self.registry)

    def _seconds(
        self, name: str, text: str, buckets: tuple[float, ...] = _LATENCY_BUCKETS
    ) -> Histogram:
        return Histogram(f"headrace_{name}_seconds", text, buckets=buckets, registry=self.registry)
