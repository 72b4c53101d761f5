"""``headrace worker``: hand over to the worker package, with the embedded server if need be."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from typing import NoReturn

import typer

from headrace.cli import render
from headrace.cli.embedded import join_server
from headrace.cli.keeper import lock_within
from headrace.cli.options import DEFAULT_MODEL, DEFAULT_QUEUE, PREFIX
from headrace.cli.served import serving_lock
from headrace.cli.supervisor import worker_environment, worker_program
from headrace.folders import state_folder
from headrace.keys import Keys

GIVEN_BY_HAND = ("REDIS_URL", "QUEUE", "MODEL")


def worker(context: typer.Context) -> NoReturn:
    """Serve a queue with a model until stopped; its own --help lists its options.

    Without --redis-url it serves the embedded server that the other commands use. Without --model
    it serves the demo model.
    """
    arguments = with_defaults(context.args, os.environ)
    program = worker_program()
    wants_help = not {"-h", "--help"}.isdisjoint(arguments)
    if not wants_help and not setting("redis-url", arguments, os.environ):
        server = join_server(state_folder())
        queue = setting("queue", arguments, os.environ) or DEFAULT_QUEUE
        serving_fd = serving_lock(server, Keys(queue).queue)
        lock_within(serving_fd, fcntl.LOCK_SH, 0)  # there may be several such workers
        # The worker holds both from here on, so the server stays up as long as it lives.
        for descriptor in (server.lock_fd, serving_fd):
            os.set_inheritable(descriptor, True)
        arguments += ["--redis-url", server.url]
        render.say(f"serving the embedded server in {server.folder}")
    environment = worker_environment() | {
        PREFIX + name: os.environ[PREFIX + name]
        for name in GIVEN_BY_HAND
        if PREFIX + name in os.environ
    }
    # One process, so signals and exit status are the worker's own.
    os.execve(program[0], [*program, *arguments], environment)


def with_defaults(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the worker's arguments with a model among them."""
    if setting("model", arguments, environ):
        return list(arguments)
    return [*arguments, "--model", DEFAULT_MODEL]


def setting(name: str, arguments: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return a setting of the worker from the command line, else from its variable, else None."""
    flag, found = f"--{name}", environ.get(PREFIX + name.replace("-", "_").upper())
    for at, word in enumerate(arguments):
        if word.startswith(f"{flag}="):
            found = word.partition("=")[2]
        elif word == flag and at + 1 < len(arguments):
            found = arguments[at + 1]
    return found or None
