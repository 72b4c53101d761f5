"""``headrace demo``: real questions answered at once, and the numbers of the run."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import options
from headrace.cli.batch_file import BatchRequest, read_lines
from headrace.cli.demo_metrics import MetricsWatch
from headrace.cli.demo_report import DemoRun, write_report
from headrace.cli.demo_view import StreamView, open_view
from headrace.cli.embedded import wait_until_stopped
from headrace.cli.exits import ExitCode
from headrace.cli.running import heed_cancellation, run
from headrace.cli.served import Place, served, worker_for
from headrace.cli.workers import list_workers
from headrace.client import AsyncClient
from headrace.errors import ConfigurationError, RequestError
from headrace.options import RequestOptions
from headrace.types import Completion

POLL_S = 0.2

Prompts = Annotated[
    Path, options.option("--prompts", "OpenAI batch lines to answer.", metavar="FILE")
]


def demo(
    prompts: Prompts = Path("examples/prompts.jsonl"),
    model: options.Model = options.DEFAULT_MODEL,
) -> None:
    """Answer a file of questions at once, on a Valkey and a worker of the demo's own."""
    requests, port = read_requests(prompts), _free_port()
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as folder:
        state = Path(folder)
        with served(None, options.DEFAULT_QUEUE, state=state) as place:
            keeper = worker_for(place, model, ("--metrics-port", str(port)))
            code = run(_demonstrate(place, requests, port), beside=keeper)
        wait_until_stopped(state)  # it would write into a folder that is being deleted
    raise typer.Exit(code)


def read_requests(prompts: Path) -> list[BatchRequest]:
    """Return the requests of a file; raises ConfigurationError for one that is not all good."""
    try:
        with prompts.open("rb") as lines:
            items = list(read_lines(lines))
    except OSError as error:
        raise ConfigurationError(f"{prompts} cannot be read: {error}") from error
    requests = [item for item in items if isinstance(item, BatchRequest)]
    for item in items:
        if not isinstance(item, BatchRequest):
            raise ConfigurationError(f"{prompts}: {item.message}")
    if not requests:
        raise ConfigurationError(f"{prompts} holds no request")
    return requests


def question_of(request: BatchRequest) -> str:
    """Return what a request asks, for people."""
    if request.body.messages is None:
        return str(request.body.prompt)
    return str(request.body.messages[-1].get("content"))


async def _demonstrate(place: Place, requests: Sequence[BatchRequest], port: int) -> ExitCode:
    await _wait_for_worker(place)
    async with place.client() as client, MetricsWatch(port) as watch:
        started_s = time.monotonic()
        with open_view([question_of(request) for request in requests]) as view:
            answers = await asyncio.gather(
                *(_answer(client, view, at, request) for at, request in enumerate(requests))
            )
        seconds = time.monotonic() - started_s
        await watch.look()
    write_report(
        DemoRun([question_of(request) for request in requests], answers, seconds, watch.seen())
    )
    return ExitCode.FAILED if any(isinstance(a, RequestError) for a in answers) else ExitCode.OK


async def _wait_for_worker(place: Place) -> None:
    async with place.connected() as connection:
        while not await list_workers(connection, place.keys):
            heed_cancellation()
            await asyncio.sleep(POLL_S)


async def _answer(
    client: AsyncClient, view: StreamView, at: int, request: BatchRequest
) -> Completion | RequestError:
    asked = RequestOptions(sampling=request.body.sampling)
    if request.body.messages is not None:
        asked["messages"] = request.body.messages
    try:
        async with client.stream(request.body.prompt, **asked) as stream:
            async for chunk in stream:
                view.add(at, chunk.text)
    except RequestError as error:
        view.end(at)
        return error
    view.end(at)
    return stream.completion


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
