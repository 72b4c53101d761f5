"""``headrace dlq list|replay|purge``: requests that took down the worker that ran them alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated

import redis.asyncio
import typer

from headrace.cli import options, render
from headrace.cli.exits import ExitCode
from headrace.cli.patient import call
from headrace.cli.requests import AsJson
from headrace.cli.running import run
from headrace.cli.served import Place, served
from headrace.errors import ConfigurationError
from headrace.functions import DeadLetter, Death, list_dead, purge_dead, replay_dead
from headrace.keys import Keys

PAGE = 100
_ENTRY_ID = re.compile(r"\d+-\d+")

EntryIds = Annotated[
    list[str] | None, typer.Argument(help="Entries as list prints them.", metavar="ENTRY...")
]
All = Annotated[bool, options.option("--all", "Every entry.")]

app = typer.Typer(help="Look at dead letters, replay them, or purge them.", no_args_is_help=True)


@app.command("list")
def list_letters(
    redis_url: options.RedisUrl = None,
    queue: options.Queue = options.DEFAULT_QUEUE,
    as_json: AsJson = False,
) -> None:
    """List dead letters, oldest first."""
    with served(redis_url, queue) as place:
        raise typer.Exit(run(_list(place, as_json)))


@app.command()
def replay(
    entries: EntryIds = None,
    redis_url: options.RedisUrl = None,
    queue: options.Queue = options.DEFAULT_QUEUE,
    every: All = False,
) -> None:
    """Queue dead letters again, with their strikes forgotten."""
    _check_selection(entries, every)
    with served(redis_url, queue) as place:
        raise typer.Exit(run(_replay(place, entries)))


@app.command()
def purge(
    entries: EntryIds = None,
    redis_url: options.RedisUrl = None,
    queue: options.Queue = options.DEFAULT_QUEUE,
    every: All = False,
) -> None:
    """Delete dead letters for good."""
    _check_selection(entries, every)
    with served(redis_url, queue) as place:
        raise typer.Exit(run(_purge(place, entries)))


def _check_selection(entries: list[str] | None, every: bool) -> None:
    if bool(entries) == every:
        raise ConfigurationError("name entries, or give --all")
    for entry_id in entries or ():
        if not _ENTRY_ID.fullmatch(entry_id):
            raise ConfigurationError(f"{entry_id!r} is no entry id: they look like 1700000000000-0")


async def _list(place: Place, as_json: bool) -> ExitCode:
    async with place.connected() as client:
        letters = [letter async for letter in _letters(client, place.keys)]
    if as_json:
        for letter in letters:
            render.write_json(asdict(letter))
    else:
        render.write_table(
            ("entry", "died", "tenant", "request", "strikes", "reason", "deaths"),
            [
                (
                    *(letter.entry_id, render.format_time(_died_at_s(letter)), letter.tenant),
                    *(letter.request_id, letter.strikes, letter.reason),
                    "; ".join(map(_shown, letter.evidence)),
                )
                for letter in letters
            ],
        )
    return ExitCode.OK


async def _replay(place: Place, entries: list[str] | None) -> ExitCode:
    keys, num_missing = place.keys, 0
    async with place.connected() as client:
        chosen = entries or [letter.entry_id async for letter in _letters(client, keys)]
        for entry_id in chosen:
            if await call(client, replay_dead(keys, entry_id=entry_id)):
                render.say(f"{entry_id} is queued again")
            else:
                num_missing += 1
                render.fail(f"{entry_id} is not there, or its request is gone")
    return ExitCode.FAILED if num_missing else ExitCode.OK


async def _purge(place: Place, entries: list[str] | None) -> ExitCode:
    async with place.connected() as client:
        num_purged = await call(client, purge_dead(place.keys, entry_ids=entries))
    render.say(f"{num_purged} deleted")
    is_short = entries is not None and num_purged < len(set(entries))
    return ExitCode.FAILED if is_short else ExitCode.OK


async def _letters(client: redis.asyncio.Redis, keys: Keys) -> AsyncIterator[DeadLetter]:
    """Yield all dead letters, a page at a time."""
    start = "-"
    while True:
        page = await call(client, list_dead(keys, count=PAGE, start=start))
        for letter in page:
            yield letter
        if len(page) < PAGE:
            return
        start = f"({page[-1].entry_id}"
        await asyncio.sleep(0)


def _shown(death: Death) -> str:
    company = "alone" if death.was_alone else "in a batch"
    tokens = f"tokens {death.granted_tokens} to {death.num_tokens}"
    at = render.format_time(death.at_ms / 1000)
    return f"{at} {death.worker_id} epoch {death.epoch} {company}, {tokens}: {death.cause}"


def _died_at_s(letter: DeadLetter) -> float:
    return int(letter.entry_id.partition("-")[0]) / 1000
