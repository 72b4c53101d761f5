"""``headrace enqueue``, ``attach``, ``status`` and what changes one request at a time."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from headrace.cli import options, render
from headrace.cli.exits import ExitCode
from headrace.cli.forms import form_from
from headrace.cli.generate import PromptArgument, request_from
from headrace.cli.patient import call
from headrace.cli.running import run
from headrace.cli.served import Place, served
from headrace.cli.workers import WorkerInfo, list_workers
from headrace.functions import QueueDepth, depth
from headrace.keys import LANES
from headrace.options import RequestOptions
from headrace.types import RequestState, RequestStatus, Timeout

RequestId = Annotated[str, typer.Argument(help="What enqueue printed.", metavar="ID")]
AsJson = Annotated[bool, options.option("--json", "Print JSON.")]


def enqueue(
    prompt: PromptArgument,
    *,
    redis_url: options.RedisUrl = None,
    queue: options.Queue = options.DEFAULT_QUEUE,
    tenant: options.Tenant = options.DEFAULT_TENANT,
    request_id: Annotated[
        str | None,
        options.option("--request-id", "An id of your own; asking again under it adds no request."),
    ] = None,
    raw: options.Raw = False,
    system: options.System = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    include_stop: options.IncludeStop = False,
    bad_word: options.BadWord = None,
    echo: options.Echo = False,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    choice: options.Choice = None,
    priority: options.Priority = 5,
    ttl: options.Ttl = None,
) -> None:
    """Enqueue one prompt, print its id, and leave; `headrace attach ID` reads the answer.

    Without --redis-url it waits in the embedded server until a worker is started there.
    """
    form = form_from(json_schema, regex, choice)
    says = {"seed": seed, "bad_words": bad_word, "echo": echo, "response_format": form}
    ends = {"max_tokens": max_tokens, "stop": stop, "include_stop": include_stop}
    draw = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    text, request = request_from(
        prompt, raw=raw, system=system, priority=priority, ttl=ttl, sampling=says | ends | draw
    )
    if request_id is not None:
        request["request_id"] = request_id
    with served(redis_url, queue, tenant) as place:
        raise typer.Exit(run(_enqueue(place, text, request)))


def attach(
    request_id: RequestId,
    *,
    redis_url: options.RedisUrl = None,
    queue: options.Queue = options.DEFAULT_QUEUE,
    tenant: options.Tenant = options.DEFAULT_TENANT,
    after: Annotated[
        int, options.option("--after", "Leave out this many tokens of the answer.", min=0)
    ] = 0,
    timeout: Annotated[
        float,
        options.option(
            "--timeout", "Give up after so long without a token: 30s, 5m.", parser=options.duration
        ),
    ] = 120.0,
) -> None:
    """Stream the answer of a request, all of it or from a token on; Ctrl-C leaves it running."""
    with served(redis_url, queue, tenant) as place:
        raise typer.Exit(run(_attach(place, request_id, after, timeout)))


def status(
    request_id: Annotated[
        str | None, typer.Argument(help="A request; without it, the queue.", metavar="[ID]")
    ] = None,
    *,
    redis_url: options.RedisUrl = None,
    queue: options.Queue = options.DEFAULT_QUEUE,
    tenant: options.Tenant = options.DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Show where a request stands; or, without ID, the queue's depth and its workers."""
    with served(redis_url, queue, tenant) as place:
        shown = (
            _show_queue(place, as_json)
            if request_id is None
            else _show_request(place, request_id, as_json)
        )
        raise typer.Exit(run(shown))


def cancel(
    request_id: RequestId,
    *,
    redis_url: options.RedisUrl = None,
    queue: options.Queue = options.DEFAULT_QUEUE,
    tenant: options.Tenant = options.DEFAULT_TENANT,
) -> None:
    """Cancel a request: at once while it waits, at its next token while it runs."""
    with served(redis_url, queue, tenant) as place:
        raise typer.Exit(run(_cancel(place, request_id)))


def finish(
    request_id: RequestId,
    *,
    redis_url: options.RedisUrl = None,
    queue: options.Queue = options.DEFAULT_QUEUE,
    tenant: options.Tenant = options.DEFAULT_TENANT,
) -> None:
    """End a request with its text so far, which stays readable; no error for its readers."""
    with served(redis_url, queue, tenant) as place:
        raise typer.Exit(run(_finish(place, request_id)))


def reprioritise(
    request_id: RequestId,
    priority: Annotated[int, typer.Argument(help="0 is soonest.", min=0, max=LANES - 1)],
    *,
    redis_url: options.RedisUrl = None,
    queue: options.Queue = options.DEFAULT_QUEUE,
    tenant: options.Tenant = options.DEFAULT_TENANT,
) -> None:
    """Serve a request sooner or later, whether it waits or runs."""
    with served(redis_url, queue, tenant) as place:
        raise typer.Exit(run(_reprioritise(place, request_id, priority)))


async def _enqueue(place: Place, prompt: str | None, request: RequestOptions) -> ExitCode:
    async with place.client() as client:
        render.write_result(await client.submit(prompt, **request))
    return ExitCode.OK


async def _attach(place: Place, request_id: str, after: int, timeout_s: float) -> ExitCode:
    timeout = Timeout(first_chunk=timeout_s, between_chunks=timeout_s, total=None)
    async with (
        place.client() as client,
        client.attach(request_id, after=after, timeout=timeout) as stream,
    ):
        async for chunk in stream:
            render.write_result(chunk.text, end="")
    render.write_result("")
    render.say(render.summary_of(stream.completion))
    return ExitCode.OK


async def _cancel(place: Place, request_id: str) -> ExitCode:
    async with place.client() as client:
        return _say_end(request_id, await client.cancel(request_id))


async def _finish(place: Place, request_id: str) -> ExitCode:
    async with place.client() as client:
        return _say_end(request_id, await client.finish_now(request_id))


async def _reprioritise(place: Place, request_id: str, priority: int) -> ExitCode:
    async with place.client() as client:
        state = await client.reprioritise(request_id, priority)
    is_late = f"; it is {state} already" if state.is_terminal else ""
    render.say(f"request {request_id} has priority {priority}{is_late}")
    return ExitCode.OK


def _say_end(request_id: str, state: RequestState) -> ExitCode:
    said = "will end at its next token" if state is RequestState.RUNNING else f"is {state}"
    render.say(f"request {request_id} {said}")
    return ExitCode.OK


async def _show_request(place: Place, request_id: str, as_json: bool) -> ExitCode:
    async with place.client() as client:
        found = await client.status(request_id)
    if as_json:
        render.write_json(render.plain(asdict(found)))
    else:
        render.write_table(("field", "value"), _rows_of(found))
    return ExitCode.OK


def _rows_of(found: RequestStatus) -> list[tuple[str, object]]:
    shown: list[tuple[str, object]] = []
    for name, value in asdict(found).items():
        if value is not None:
            is_time = name.endswith("_at_s")
            label = name.removesuffix("_s") if is_time else name
            shown.append((label, render.format_time(value) if is_time else value))
    return shown


async def _show_queue(place: Place, as_json: bool) -> ExitCode:
    async with place.connected() as connection:
        counts = await call(connection, depth(place.keys))
        workers = await list_workers(connection, place.keys)
    if as_json:
        render.write_json(render.plain(_as_values(counts, workers)))
        return ExitCode.OK
    render.write_result(f"queued {counts.queued} · running {counts.running}")
    if counts.by_tenant:
        tenants = [(name, t.queued, t.running) for name, t in sorted(counts.by_tenant.items())]
        render.write_table(("tenant", "queued", "running"), tenants)
    if not workers:
        render.say(f"no worker serves queue {place.queue!r}: headrace worker")
        return ExitCode.OK
    render.write_table(
        ("worker", "last heartbeat", "facts"),
        [
            (w.worker_id, _heartbeat(w), " ".join(f"{k}={v}" for k, v in w.facts.items()))
            for w in workers
        ],
    )
    return ExitCode.OK


def _heartbeat(worker: WorkerInfo) -> str:
    """A worker that is silent for longer than its lease holds nothing any more."""
    ago = f"{worker.seen_s:.1f} s ago"
    return f"{ago}, silent" if worker.is_silent else ago


def _as_values(counts: QueueDepth, workers: tuple[WorkerInfo, ...]) -> dict[str, Any]:
    return {**asdict(counts), "workers": [asdict(worker) for worker in workers]}
