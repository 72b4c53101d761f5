"""Wiring: makes the parts of a worker from its settings, and gives each the others it needs."""

from __future__ import annotations

import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from headrace.functions import Held
from headrace.keys import Keys
from headrace_worker.backoff import Backoff, redis_backoff
from headrace_worker.engine.messages import AbortSequences, SetPaused
from headrace_worker.engine.settings import EngineSettings, Reserve
from headrace_worker.serving.capacity import Capacity
from headrace_worker.serving.claiming import ClaimLoop
from headrace_worker.serving.feeder import Feeder
from headrace_worker.serving.intake import Intake
from headrace_worker.serving.ledger import Ledger
from headrace_worker.serving.metrics import Metrics
from headrace_worker.serving.outbox import EmitPolicy
from headrace_worker.serving.pressure import Pressure
from headrace_worker.serving.progress import ProgressWatch
from headrace_worker.serving.publisher import Publisher
from headrace_worker.serving.reporting import Reporter
from headrace_worker.serving.service import Service
from headrace_worker.serving.supervisor import Supervisor
from headrace_worker.serving.tokenizer import VOCABULARY_FILE, Tokenizer
from headrace_worker.serving.tokenizer_store import tokenizer_folder
from headrace_worker.settings import WorkerSettings
from headrace_worker.transport.control import LOOK_EVERY_S, ControlListener
from headrace_worker.transport.heartbeat import Heart
from headrace_worker.transport.housekeeping import REAPS_PER_LEASE, Housekeeper, repeat
from headrace_worker.transport.lease import LeaseKeeper
from headrace_worker.transport.link import Link
from headrace_worker.transport.queue import RedisQueue

ENGINE_COMMAND = (sys.executable, "-m", "headrace_worker.engine.process")
FIRST_RESTART_S, MOST_RESTART_S = 0.1, 30.0  # of the engine
PREFETCH_SHARE = 8  # one sequence may wait in the engine for each 8 that may run


@dataclass(frozen=True, slots=True)
class Parts:
    """What the composition root needs afterwards."""

    service: Service
    ledger: Ledger
    claiming: ClaimLoop


def make_queue(settings: WorkerSettings, link: Link, blocking: Redis) -> RedisQueue:
    """Return the queue as this worker sees it."""
    return RedisQueue(
        link,
        blocking,
        Keys(settings.queue),
        worker_id=settings.worker_id,
        lease_s=settings.lease_ttl,
        max_strikes=settings.max_strikes,
    )


def make_capacity(settings: WorkerSettings) -> Capacity:
    """Return who knows what can be claimed; where nobody is preempted, nobody gives way either."""
    return Capacity(
        num_prefetch=max(1, settings.max_num_seqs // PREFETCH_SHARE),
        gives_way=Reserve(settings.reserve) is not Reserve.WORST,
    )


def make_supervisor(
    settings: WorkerSettings, watch: ProgressWatch, model: Path, tokenizer: Tokenizer
) -> Supervisor:
    """Return the keeper of the engine process; nothing is started yet."""
    return Supervisor(
        settings.engine_command or ENGINE_COMMAND,
        engine_settings(settings, model, tokenizer),
        watch=watch,
        look_every_s=look_every_s(settings),
        backoff=Backoff(FIRST_RESTART_S, MOST_RESTART_S),
        clock=time.monotonic,
    )


def engine_settings(settings: WorkerSettings, model: Path, tokenizer: Tokenizer) -> EngineSettings:
    """Return what the engine has to know."""
    return EngineSettings(
        model=str(model),
        model_name=settings.model_name,
        model_impl=settings.model_impl,
        quantization=settings.quantization,
        dtype=settings.dtype,
        device=settings.device,
        tensor_parallel_size=settings.tensor_parallel_size,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        kv_cache_memory_bytes=settings.kv_cache_memory,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        block_size=settings.block_size,
        attention_backend=settings.attention_backend,
        num_threads=settings.num_threads,
        cuda_graphs=not settings.enforce_eager,
        one_ahead=None if settings.async_scheduling else False,  # None: where the device gains
        reserve=Reserve(settings.reserve),
        enable_prefix_caching=settings.enable_prefix_caching,
        sampled_vocab_size=tokenizer.vocab_size,
        tokenizer_file=str(tokenizer_folder(model) / VOCABULARY_FILE),
        eos_token_ids=tuple(sorted(i for i in tokenizer.eos_token_ids if i < tokenizer.vocab_size)),
    )


def look_every_s(settings: WorkerSettings) -> float:
    """Return how often the engine is asked for a sign of life."""
    return min(settings.engine_hang_timeout, settings.lease_ttl) / 4


def make_parts(
    settings: WorkerSettings,
    *,
    queue: RedisQueue,
    supervisor: Supervisor,
    tokenizer: Tokenizer,
    metrics: Metrics,
    capacity: Capacity,
) -> Parts:
    """Return the service and what belongs to it; lambdas let them refer to each other."""
    reporter = Reporter(metrics)
    claiming = ClaimLoop(
        queue,
        room=lambda: capacity.room(ledger.requests),
        is_idle=lambda: len(ledger) == 0,
        exit_when_empty=settings.exit_when_empty,
        backoff=redis_backoff(),
    )
    ledger = Ledger(
        queue,
        worker_id=settings.worker_id,
        emit_policy=EmitPolicy(settings.flush_interval, settings.flush_tokens),
        reporter=reporter,
        clock=time.monotonic,
        abort=lambda seq_id: supervisor.send(AbortSequences((seq_id,))),
        on_left=claiming.notify,
    )
    intake = partial(Intake, tokenizer, served_model_name=settings.model_name)
    feeder = Feeder(queue, ledger, capacity, reporter, make_intake=intake, send=supervisor.send)
    pressure = _make_pressure(settings, supervisor, reporter)
    publisher = _make_publisher(settings, queue, ledger, pressure, reporter)
    service = Service(
        queue=queue,
        ledger=ledger,
        capacity=capacity,
        claiming=claiming,
        feeder=feeder,
        publisher=publisher,
        supervisor=supervisor,
        pressure=pressure,
        reporter=reporter,
        metrics=metrics,
        drain_timeout_s=settings.drain_timeout,
        clock=time.monotonic,
    )
    return Parts(service, ledger, claiming)


def _make_pressure(
    settings: WorkerSettings, supervisor: Supervisor, reporter: Reporter
) -> Pressure:
    def pause(paused: bool) -> None:
        supervisor.send(SetPaused(paused))

    return Pressure(settings.max_unsent_tokens, pause, reporter)


def _make_publisher(
    settings: WorkerSettings,
    queue: RedisQueue,
    ledger: Ledger,
    pressure: Pressure,
    reporter: Reporter,
) -> Publisher:
    return Publisher(
        queue,
        ledger,
        pressure,
        reporter,
        company_s=settings.flush_interval / 2,
        backoff=redis_backoff(),
        clock=time.monotonic,
    )


def make_chores(
    settings: WorkerSettings,
    *,
    link: Link,
    blocking: Redis,
    queue: RedisQueue,
    watch: ProgressWatch,
    metrics: Metrics,
    parts: Parts,
) -> list[Coroutine[Any, Any, None]]:
    """Return what runs beside the flow of requests: leases, heartbeat, reaping, hints."""
    keys, who, lease_s = Keys(settings.queue), settings.worker_id, settings.lease_ttl

    def held() -> list[Held]:
        return [request.held for request in parts.ledger.requests]

    leases = LeaseKeeper(
        queue,
        lease_s=lease_s,
        held=held,
        may_renew=lambda: watch.is_alive(time.monotonic()),
        on_lost=parts.service.lost,
    )
    heart = Heart(
        link,
        keys,
        worker_id=who,
        lease_s=lease_s,
        describe=lambda: {
            "model": settings.model_name,
            "num_held": len(parts.ledger),
            "lease_s": f"{lease_s:g}",
            "tensor_parallel_size": settings.tensor_parallel_size,
        },
        set_depth=metrics.set_queue_depth,
    )
    housekeeper = Housekeeper(
        link, keys, worker_id=who, lease_s=lease_s, max_strikes=settings.max_strikes
    )
    listener = ControlListener(blocking, keys, queue, held=held, on_wish=parts.service.heed)
    return [
        leases.run(),
        heart.run(),
        repeat(lease_s / REAPS_PER_LEASE, housekeeper.reap),
        repeat(lease_s, housekeeper.clean_up),
        listener.run(),
        repeat(LOOK_EVERY_S, listener.look_at_all),
    ]
