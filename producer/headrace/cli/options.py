"""Options that several commands share; each flag is also a variable ``HEADRACE_<FLAG>``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.errors import ConfigurationError, InvalidRequest
from headrace.options import milliseconds
from headrace.sampling import SamplingParams
from headrace.units import parse_duration

PREFIX = "HEADRACE_"


def option(flag: str, help_text: str, *short: str, **settings: Any) -> Any:
    """Return a typer option whose variable is named after its flag."""
    return typer.Option(flag, *short, envvar=variable_of(flag), help=help_text, **settings)


def variable_of(flag: str) -> str:
    """Return the environment variable of a flag: ``--top-p`` is ``HEADRACE_TOP_P``."""
    return PREFIX + flag.removeprefix("--").partition("/")[0].replace("-", "_").upper()


def duration(text: str | float) -> float:
    """Read a duration for typer, which also hands the default over; raises BadParameter."""
    if isinstance(text, float):
        return text
    try:
        return parse_duration(text)
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from error


def lifetime(text: str | float) -> float:
    """Read a duration that a request may have, for typer; raises BadParameter."""
    seconds = duration(text)
    try:
        milliseconds("ttl", seconds)
    except InvalidRequest as error:
        raise typer.BadParameter(error.message) from error
    return seconds


def sampling_from(**options: Any) -> SamplingParams:
    """Return sampling options from flags that may be None; raises ConfigurationError."""
    given = {name: value for name, value in options.items() if value not in (None, [])}
    try:
        return SamplingParams(**given)
    except InvalidRequest as error:
        raise ConfigurationError(error.message) from error


RedisUrl = Annotated[
    str | None,
    option(
        "--redis-url",
        "Where the queue lives: redis://, rediss://, unix:// or redis+sentinel://. Without it, a "
        "Valkey of its own under the state folder.",
        show_envvar=True,
        metavar="URL",
    ),
]
Queue = Annotated[str, option("--queue", "Name of the queue.")]
Tenant = Annotated[str, option("--tenant", "Who asks; tenants share the queue fairly.")]
Model = Annotated[
    str,
    option(
        "--model",
        "For the worker that this command starts: a pulled name, a folder of safetensors, a .gguf "
        "file or a Hugging Face id.",
    ),
]
Raw = Annotated[
    bool, option("--raw", "Send the bare prompt instead of a user's message in the chat template.")
]
System = Annotated[str | None, option("--system", "System message before the prompt.")]
MaxTokens = Annotated[int | None, option("--max-tokens", "Longest answer, in tokens.")]
Temperature = Annotated[float | None, option("--temperature", "0 is greedy.")]
TopP = Annotated[float | None, option("--top-p", "Keep the likeliest tokens of this total.")]
TopK = Annotated[int | None, option("--top-k", "Keep this many of the likeliest tokens.")]
MinP = Annotated[float | None, option("--min-p", "Drop tokens below this share of the likeliest.")]
Seed = Annotated[int | None, option("--seed", "The same seed gives the same answer.")]
Stop = Annotated[
    list[str] | None, option("--stop", "End before this text; may be given several times.")
]
IncludeStop = Annotated[
    bool, option("--include-stop", "Print the --stop text that ended the answer, too.")
]
BadWord = Annotated[
    list[str] | None,
    option(
        "--bad-word",
        "Ban the tokens that spell this; the text may still hold it in another spelling, such as "
        "letter by letter. May be given several times.",
    ),
]
Echo = Annotated[bool, option("--echo", "Print the prompt, as the model reads it, first.")]
JsonSchema = Annotated[
    Path | None,
    option("--json-schema", "Answer in JSON that fits the schema in this file.", metavar="FILE"),
]
Regex = Annotated[
    str | None, option("--regex", "Answer with a text that fits this regular expression, whole.")
]
Choice = Annotated[
    list[str] | None, option("--choice", "Answer with one of these; may be given several times.")
]
Priority = Annotated[int, option("--priority", "0 is served soonest, 9 last.", min=0, max=9)]
Ttl = Annotated[
    float | None,
    option("--ttl", "Drop the request when it has waited so long: 30s, 2h.", parser=lifetime),
]

DEFAULT_QUEUE = "default"
DEFAULT_TENANT = "default"
DEFAULT_MODEL = "smollm2-135m"
