"""``headrace generate``: one prompt, streamed to the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from headrace.cli import options, render
from headrace.cli.exits import ExitCode
from headrace.cli.forms import form_from
from headrace.cli.running import run
from headrace.cli.served import Place, served, worker_for
from headrace.cli.supervisor import START_TIMEOUT_S
from headrace.errors import ConfigurationError
from headrace.options import RequestOptions
from headrace.types import Timeout

PromptArgument = Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")]


def generate(
    prompt: PromptArgument,
    *,
    redis_url: options.RedisUrl = None,
    queue: options.Queue = options.DEFAULT_QUEUE,
    tenant: options.Tenant = options.DEFAULT_TENANT,
    model: options.Model = options.DEFAULT_MODEL,
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
    quiet: Annotated[bool, options.option("--quiet", "No summary line on stderr.", "-q")] = False,
) -> None:
    """Answer one prompt and stream it to the terminal; Ctrl-C cancels the request.

    The prompt is sent as a user's message, in the model's chat template; --raw sends it bare, for
    models that were not trained to chat. A line with token counts and times follows on stderr.
    """
    form = form_from(json_schema, regex, choice)
    says = {"seed": seed, "bad_words": bad_word, "echo": echo, "response_format": form}
    ends = {"max_tokens": max_tokens, "stop": stop, "include_stop": include_stop}
    draw = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    text, request = request_from(
        prompt, raw=raw, system=system, priority=priority, ttl=ttl, sampling=says | ends | draw
    )
    with served(redis_url, queue, tenant) as place:
        keeper = worker_for(place, model)
        body = _stream(place, text, request, quiet)
        raise typer.Exit(run(body, beside=keeper))


def request_from(
    prompt: str,
    *,
    raw: bool,
    system: str | None,
    priority: int,
    ttl: float | None,  # seconds
    sampling: Mapping[str, Any],  # by option; None where the flag was not given
) -> tuple[str | None, RequestOptions]:
    """Return the bare prompt, or None and options with messages; raises ConfigurationError."""
    request = RequestOptions(priority=priority, sampling=options.sampling_from(**sampling))
    if ttl is not None:
        request["ttl"] = ttl
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise ConfigurationError("the prompt is empty")
    if raw and system is not None:
        raise ConfigurationError("--system needs the chat template, which --raw leaves out")
    if raw:
        return text, request
    messages = [] if system is None else [{"role": "system", "content": system}]
    request["messages"] = [*messages, {"role": "user", "content": text}]
    return None, request


async def _stream(
    place: Place, prompt: str | None, request: RequestOptions, quiet: bool
) -> ExitCode:
    # A worker of our own has to load its model first.
    patience = Timeout(first_chunk=START_TIMEOUT_S) if place.embedded else Timeout()
    async with (
        place.client(timeout=patience) as client,
        client.stream(prompt, **request) as stream,
    ):
        async for chunk in stream:
            render.write_result(chunk.text, end="")
    render.write_result("")
    if not quiet:
        render.say(render.summary_of(stream.completion))
    return ExitCode.OK
