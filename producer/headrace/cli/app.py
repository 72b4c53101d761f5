"""The commands under one name, and the one place that turns their errors into a line and a code."""

from __future__ import annotations

import sys

import typer

from headrace.cli import dlq, render
from headrace.cli.acl import acl
from headrace.cli.demo import demo
from headrace.cli.doctor import doctor
from headrace.cli.exits import EXIT_CODES_HELP, exit_code_of
from headrace.cli.generate import generate
from headrace.cli.pull import pull
from headrace.cli.requests import attach, cancel, enqueue, finish, reprioritise, status
from headrace.cli.run_batch import run_batch
from headrace.cli.variables import check_variables
from headrace.cli.worker import worker
from headrace.errors import HeadraceError

HELP = f"""Push prompts to Redis Streams, read tokens back exactly once.

Every flag is also a variable, --redis-url as HEADRACE_REDIS_URL. Without it, commands share an
embedded Valkey under ~/.local/state/headrace, and generate and run-batch bring a worker of their
own.

{EXIT_CODES_HELP}
"""

app = typer.Typer(
    name="headrace",
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # lines of a paragraph flow
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

app.command()(generate)
app.command("run-batch")(run_batch)
app.command()(enqueue)
app.command()(attach)
app.command()(status)
app.command()(cancel)
app.command()(finish)
app.command()(reprioritise)
app.add_typer(dlq.app, name="dlq")
app.command()(acl)
app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
)(worker)
app.command()(pull)
app.command()(doctor)
app.command(hidden=True)(demo)


@app.callback()
def _before_every_command() -> None:
    check_variables()


def run_app() -> int:
    """Run the command line and return the exit code; errors that are expected show no traceback."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # replace what it cannot show
    try:
        app()
    except HeadraceError as error:
        render.fail(str(error))
        return exit_code_of(error)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    return 0
