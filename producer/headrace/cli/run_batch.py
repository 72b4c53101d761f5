"""``headrace run-batch``: a file of OpenAI batch lines in, a file of result lines out."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from headrace.cli import options, render
from headrace.cli.batch_file import BatchRequest, read_lines
from headrace.cli.batch_id import batch_id
from headrace.cli.batch_result import encode_line
from headrace.cli.batch_run import Ask, BatchRun
from headrace.cli.exits import ExitCode
from headrace.cli.progress import shown_progress
from headrace.cli.result_file import EarlierRun, ResultFile
from headrace.cli.running import run
from headrace.cli.served import Place, served, worker_for
from headrace.client import AsyncClient
from headrace.errors import ConfigurationError
from headrace.options import RequestOptions
from headrace.types import Completion, Timeout

RESULT_TTL_S = 1800.0
"""How long an answer waits in Redis; those of a long batch would not all fit there."""

# A batch waits for its turn, however long the queue is; a silent worker's requests go to others.
PATIENT = Timeout(first_chunk=None, between_chunks=None, total=None, redis=300.0)

Input = Annotated[
    str, options.option("--input", "Lines to answer; - is stdin.", "-i", metavar="FILE")
]
Output = Annotated[
    str,
    options.option(
        "--output", "Result lines; - is stdout, which cannot be resumed.", "-o", metavar="FILE"
    ),
]
MaxInFlight = Annotated[
    int, options.option("--max-in-flight", "Most requests in the queue at once.", min=1)
]


def run_batch(
    *,
    source: Input,
    target: Output,
    redis_url: options.RedisUrl = None,
    queue: options.Queue = options.DEFAULT_QUEUE,
    tenant: options.Tenant = options.DEFAULT_TENANT,
    model: options.Model = options.DEFAULT_MODEL,
    max_in_flight: MaxInFlight = 256,
    max_tokens: Annotated[
        int | None, options.option("--max-tokens", "For lines that name none.", min=1)
    ] = None,
    priority: options.Priority = 7,
) -> None:
    """Answer a file of OpenAI batch lines; run it again to go on where it was stopped.

    Results come as they finish, one line for each line of the input, matched by custom_id. A second
    run skips what is answered, asks again what failed (but dead letters and what was cancelled),
    and attaches to what is still in the queue. Exit code 0 when every line was answered, 1 when
    some failed.

    Taken from a body: messages or prompt, model, tools, and the sampling options as OpenAI and vLLM
    spell them (docs/requests.md); without max_tokens a chat line runs to the end of the context and
    a completions line stops at 16, as in the OpenAI API. Ignored: user, metadata, store,
    stream_options, service_tier, safety_identifier, prompt_cache_key, parallel_tool_calls. Anything
    else is an error of its line.
    """
    plan = BatchPlan(
        source=None if source == "-" else Path(source),
        target=None if target == "-" else Path(target),
        model=model,
        max_in_flight=max_in_flight,
        max_tokens=max_tokens,
        priority=priority,
    )
    plan.check()
    with (
        _opened(plan.source) as lines,
        _results(plan.target) as (write, earlier),
        served(redis_url, queue, tenant) as place,
    ):
        keeper = worker_for(place, model)
        body = _run(plan, place, lines, write, earlier)
        raise typer.Exit(run(body, beside=keeper))


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What one call of the command is to do."""

    source: Path | None  # None: stdin
    target: Path | None  # None: stdout
    model: str  # of a worker of our own; names the model in result lines whose body names none
    max_in_flight: int  # requests
    max_tokens: int | None  # for lines that name none; None: as in the OpenAI API
    priority: int

    def check(self) -> None:
        """Raise ConfigurationError unless the files are two, and the input is there."""
        if self.source is None or self.target is None:
            return
        if not self.source.is_file():
            raise ConfigurationError(f"{self.source} is not a file")
        if self.target.exists() and self.source.samefile(self.target):
            raise ConfigurationError(f"{self.source} is both input and output")


async def _run(
    plan: BatchPlan,
    place: Place,
    lines: BinaryIO,
    write: Callable[[dict[str, Any]], None],
    earlier: EarlierRun,
) -> ExitCode:
    async with place.client(timeout=PATIENT, result_ttl=RESULT_TTL_S) as client:
        batch = BatchRun(
            _asker(client, plan.priority),
            write,
            batch=batch_id(plan.source, plan.target),
            model=plan.model,
            max_in_flight=plan.max_in_flight,
            earlier=earlier,
        )
        async with shown_progress(batch.counts, _count_lines(plan.source)):
            try:
                counts = await batch.run(read_lines(lines, plan.max_tokens))
            except asyncio.CancelledError:
                render.say(f"stopped: {batch.counts.num_done} lines have a result; run it again")
                raise
    num_failed = counts.num_failed + earlier.num_failed
    skipped = f", {counts.num_skipped} of them before" if counts.num_skipped else ""
    render.say(f"{counts.num_done} lines have a result{skipped}; {num_failed} failed")
    return ExitCode.FAILED if num_failed else ExitCode.OK


def _asker(client: AsyncClient, priority: int) -> Ask:
    async def ask(request: BatchRequest, request_id: str) -> Completion:
        body = request.body
        options_given = RequestOptions(
            sampling=body.sampling, priority=priority, request_id=request_id
        )
        if body.messages is not None:
            options_given["messages"] = body.messages
            options_given["tools"] = body.tools
            options_given["chat_template_kwargs"] = body.chat_template_kwargs
        if body.model is not None:
            options_given["model"] = body.model
        # Stopping the run leaves its requests in the queue, where the next run finds them.
        return await client.generate(body.prompt, cancel_on_exit=False, **options_given)

    return ask


@contextmanager
def _opened(source: Path | None) -> Iterator[BinaryIO]:
    if source is None:
        yield sys.stdin.buffer
        return
    with source.open("rb") as lines:
        yield lines


@contextmanager
def _results(
    target: Path | None,
) -> Iterator[tuple[Callable[[dict[str, Any]], None], EarlierRun]]:
    if target is None:
        yield (lambda line: render.write_result(encode_line(line).decode(), end="")), EarlierRun()
        return
    with ResultFile(target) as results:
        yield results.append, results.earlier


def _count_lines(source: Path | None) -> int | None:
    """Count the lines that are not blank, for the bar; a pipe cannot be read twice."""
    if source is None:
        return None
    with source.open("rb") as lines:
        return sum(1 for line in lines if not line.isspace())
