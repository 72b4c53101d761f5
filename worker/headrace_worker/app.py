"""The composition root: connects, loads, serves and leaves, in this order, on one screen."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from headrace.errors import ConfigurationError, TransportError
from headrace_worker import logs, wiring
from headrace_worker.backoff import redis_backoff
from headrace_worker.catalogue import CatalogueError, resolve
from headrace_worker.engine.errors import SettingsError
from headrace_worker.engine.messages import EngineReady
from headrace_worker.garbage import spare_the_living
from headrace_worker.serving.bridge import EngineStartFailed
from headrace_worker.serving.capacity import Capacity
from headrace_worker.serving.http import MetricsServer
from headrace_worker.serving.metrics import Metrics
from headrace_worker.serving.progress import ProgressWatch
from headrace_worker.serving.tokenizer import Tokenizer
from headrace_worker.serving.tokenizer_store import load_tokenizer
from headrace_worker.settings import WorkerSettings
from headrace_worker.signals import StopSignals
from headrace_worker.threads import run_abandonable
from headrace_worker.transport.connection import Connections, check_server
from headrace_worker.transport.link import Link

_REASONS = (ConfigurationError, CatalogueError, EngineStartFailed, SettingsError, OSError)


def run_worker(settings: WorkerSettings) -> int:
    """Run until told to stop or out of work; return the exit status."""
    logs.configure_logs(settings.log_level, settings.log_format)
    structlog.contextvars.bind_contextvars(worker_id=settings.worker_id, model=settings.model_name)
    log = logs.get_logger()
    try:
        asyncio.run(_run(settings))
    except _REASONS as error:
        log.error(logs.WORKER_STOPPED, reason=str(error))
        return 1
    except Exception:  # the process entry: whatever it is, say it and leave; leases do the rest
        log.exception(logs.WORKER_STOPPED, reason="a fault of ours")
        return 1
    log.info(logs.WORKER_STOPPED)
    return 0


async def _run(settings: WorkerSettings) -> None:
    metrics = Metrics()
    capacity = wiring.make_capacity(settings)
    watch = ProgressWatch(settings.engine_hang_timeout, wiring.look_every_s(settings))
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        connections = await stack.enter_async_context(
            Connections(settings.redis_url.get_secret_value(), settings.lease_ttl)
        )
        link = Link(connections.commands, connections.command_timeout_s)
        await _serve_pages(stack, settings, metrics, capacity, link)
        _tell_start(settings)

        preparing = asyncio.ensure_future(_prepare(link, settings))
        if not await signals.wait_for(preparing):
            return
        model, tokenizer = preparing.result()

        supervisor = wiring.make_supervisor(settings, watch, model, tokenizer)
        stack.push_async_callback(supervisor.stop)
        signals.on_second(supervisor.kill)
        loading = asyncio.ensure_future(supervisor.start())
        if not await signals.wait_for(loading):
            return
        _tell_loaded(loading.result())
        spare_the_living()

        queue = wiring.make_queue(settings, link, connections.blocking)
        parts = wiring.make_parts(
            settings,
            queue=queue,
            supervisor=supervisor,
            tokenizer=tokenizer,
            metrics=metrics,
            capacity=capacity,
        )
        signals.on_first(parts.claiming.stop)
        chores = wiring.make_chores(
            settings,
            link=link,
            blocking=connections.blocking,
            queue=queue,
            watch=watch,
            metrics=metrics,
            parts=parts,
        )
        await parts.service.run(loading.result(), chores)


async def _prepare(link: Link, settings: WorkerSettings) -> tuple[Path, Tokenizer]:
    """Wait for the server and load the text side; what fails first ends both."""
    waiting = asyncio.ensure_future(_wait_for_server(link))
    try:
        _, text_side = await asyncio.gather(waiting, _load_text_side(settings))
    finally:
        waiting.cancel()
        await asyncio.wait({waiting})
    return text_side


async def _wait_for_server(link: Link) -> None:
    """Return when Redis has answered and is safe; raises ConfigurationError when it is not."""
    backoff = redis_backoff()
    while True:
        try:
            warnings = await check_server(link.redis)
        except TransportError as error:
            link.lost("check", error)
            await asyncio.sleep(backoff.next_delay_s())
            continue
        link.found("check")
        for warning in warnings:
            logs.get_logger().warning(logs.REDIS_UNSAFE, reason=warning)
        return


async def _load_text_side(settings: WorkerSettings) -> tuple[Path, Tokenizer]:
    """Find the model's files, which may mean to download them, and load its tokenizer."""
    model = await run_abandonable(lambda: resolve(settings.model))
    return model, await asyncio.to_thread(load_tokenizer, model)  # seconds, with files to clear up


async def _serve_pages(
    stack: AsyncExitStack,
    settings: WorkerSettings,
    metrics: Metrics,
    capacity: Capacity,
    link: Link,
) -> None:
    """Answer /metrics, /healthz and /readyz from the start, if so asked."""
    if settings.metrics_port is None:
        return

    def unready() -> list[str]:
        waits_for = [] if capacity.is_open else ["the engine is not running"]
        return waits_for if link.is_connected else [*waits_for, "Redis cannot be reached"]

    await stack.enter_async_context(
        MetricsServer(
            metrics, unready=unready, host=settings.metrics_host, port=settings.metrics_port
        )
    )


def _tell_start(settings: WorkerSettings) -> None:
    logs.get_logger().info(
        logs.WORKER_STARTED, queue=settings.queue, redis=settings.redis_address, pid=os.getpid()
    )


def _tell_loaded(ready: EngineReady) -> None:
    """Log the memory sum: (M - W - activations) / k tokens fit."""
    log = logs.get_logger()
    if ready.kernels_build_s is not None:
        log.info(logs.KERNELS_BUILT, build_s=round(ready.kernels_build_s, 3))
    if ready.missing_kernels is not None:
        log.warning(logs.KERNELS_MISSING, reason=ready.missing_kernels)
    log.info(
        logs.MODEL_LOADED,
        device=ready.device,
        tensor_parallel_size=ready.tensor_parallel_size,
        dtype=ready.dtype,
        attention_backend=ready.attention_backend,
        max_model_len=ready.max_model_len,
        load_s=round(ready.load_s, 3),
    )
    log.info(
        logs.KV_CACHE_ALLOCATED,
        memory_bytes=ready.memory_budget_bytes,
        weights_bytes=ready.weights_bytes,
        activation_bytes=ready.activation_bytes,
        kv_bytes_per_token=ready.kv_bytes_per_token,
        max_kv_tokens=ready.max_kv_tokens,
        block_size=ready.block_size,
        num_blocks=ready.num_blocks,
    )
