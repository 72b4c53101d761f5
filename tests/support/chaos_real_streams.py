"""Real streams of SmolLM2, greedy, whose workers are killed: every answer is that of a calm run."""

from __future__ import annotations

import asyncio
import random
import shlex
from concurrent.futures import Future
from typing import Any

from headrace import AsyncClient, Completion, Timeout
from headrace.folders import cache_folder
from headrace_worker.catalogue import MODELS, model_file
from headrace_worker.wiring import ENGINE_COMMAND
from support.chaos_clients import View
from support.chaos_stand import RANDOM_KILLS, Stand
from support.demo_model import NAME, questions
from support.waiting import eventually
from support.workers import SHORT_LEASE, WorkerProcess

PATIENT = Timeout(first_chunk=900, between_chunks=900, total=3600)


def lacks_model() -> str:
    """Name the model when this machine has not pulled it."""
    return "" if model_file(MODELS[NAME]).exists() else f"model {NAME}"


def kill_real_workers(stand: Stand) -> None:
    """Stream undisturbed, then again while workers are killed, and compare every token."""
    worker = start_real(stand)
    calm, _ = stand.call(stream_all(stand, "calm"), timeout_s=1800)
    views: dict[int, View] = {}
    running = stand.begin(stream_all(stand, "killed", views))
    for _ in range(stand.size.rounds):
        worker = kill_in_the_middle(stand, worker, running, views)
    answers, views = running.result(timeout=1800)
    differ = [n for n, answer in answers.items() if answer.token_ids != calm[n].token_ids]
    stand.result.measure("streams", len(answers), at_least=stand.size.requests)
    stand.result.measure("different from the calm run", len(differ), at_most=0)
    wrong = [view.wrong[0] for view in views.values() if view.wrong]
    stand.result.measure("readers that saw a gap or a token twice", len(wrong), at_most=0)
    taken_over = [e for e in stand.events("delivery.reclaimed") if e["num_tokens"] > 0]
    stand.result.measure("streams taken over in the middle", len(taken_over), at_least=1)


def start_real(stand: Stand) -> WorkerProcess:
    """Start a worker that serves SmolLM2 in float32, all streams at once."""
    return stand.farm.ready(
        *("--max-num-seqs", str(stand.size.requests), *RANDOM_KILLS, *SHORT_LEASE),
        env={
            "HEADRACE_MODEL": NAME,
            "HEADRACE_SERVED_MODEL_NAME": NAME,
            "HEADRACE_ENGINE_COMMAND": shlex.join(ENGINE_COMMAND),
            "HEADRACE_CACHE_DIR": str(cache_folder()),
            "HEADRACE_DTYPE": "float32",
            "HEADRACE_LOG_LEVEL": "info",
        },
    )


def kill_in_the_middle(
    stand: Stand, worker: WorkerProcess, running: Future[Any], views: dict[int, View]
) -> WorkerProcess:
    """Wait for some tokens more, by draw, and kill; returns the next worker."""
    seen = sum(len(view.tokens) for view in list(views.values()))
    wanted = seen + stand.draw.randint(1, stand.size.requests * stand.size.tokens // 8)
    eventually(
        lambda: running.done() or sum(len(v.tokens) for v in list(views.values())) >= wanted,
        timeout_s=900,
    )
    stand.history.note("kill worker", tokens=wanted)
    worker.kill()
    return start_real(stand)


async def stream_all(
    stand: Stand, name: str, views: dict[int, View] | None = None
) -> tuple[dict[int, Completion], dict[int, View]]:
    """Stream every question at once; returns answers and views by number."""
    views = {} if views is None else views
    answers: dict[int, Completion] = {}
    async with AsyncClient(stand.server.url, queue=stand.keys.queue, timeout=PATIENT) as client:

        async def read(number: int) -> None:
            view = views[number] = View()
            async with client.stream(
                messages=question(stand, number),
                request_id=f"{name}-{number}",
                max_tokens=stand.size.tokens,
                temperature=0,
            ) as stream:
                async for chunk in stream:
                    view.take(chunk, stand.history.now_s)
            answers[number] = stream.completion

        async with asyncio.TaskGroup() as group:
            for number in range(stand.size.requests):
                group.create_task(read(number))
    return answers, views


def question(stand: Stand, number: int) -> list[dict[str, Any]]:
    """Return the messages of a stream: one to three questions of the demo."""
    draw = random.Random(f"{stand.result.seed} {number}")
    content = " ".join(draw.sample(questions(), draw.randint(1, 3)))
    return [{"role": "user", "content": content}]
