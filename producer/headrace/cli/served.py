"""Where a command's queue lives: the given Redis, or the embedded server with its own worker."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import redis.asyncio

from headrace.cli import render
from headrace.cli.embedded import EmbeddedServer, embedded_server, open_lock
from headrace.cli.exits import CommandError
from headrace.cli.keeper import lock_within
from headrace.cli.options import DEFAULT_TENANT
from headrace.cli.running import heed_cancellation
from headrace.cli.supervisor import WorkerCommand, WorkerSupervisor, worker_program
from headrace.cli.workers import WorkerInfo, list_workers
from headrace.client import AsyncClient
from headrace.connections import ConnectionSettings
from headrace.folders import state_folder
from headrace.keys import Keys

LOOK_EVERY_S = 1.0
MAX_CONNECTIONS = 2


@dataclass(frozen=True, slots=True)
class Place:
    """Where a command finds its queue."""

    url: str
    queue: str
    tenant: str
    embedded: EmbeddedServer | None = None  # None: it is somebody else's server

    @property
    def keys(self) -> Keys:
        """The key names of the queue."""
        return Keys(self.queue)

    def client(self, **settings: Any) -> AsyncClient:
        """Return a client of the queue."""
        return AsyncClient(self.url, queue=self.queue, tenant=self.tenant, **settings)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[redis.asyncio.Redis]:
        """Yield a connection for what no client does."""
        connection = ConnectionSettings(self.url, MAX_CONNECTIONS).commands()
        try:
            yield connection
        finally:
            await connection.aclose()


@contextmanager
def served(
    redis_url: str | None, queue: str, tenant: str = DEFAULT_TENANT, *, state: Path | None = None
) -> Iterator[Place]:
    """Yield the given server, or start or join the embedded one for as long as the block lasts.

    ``state`` replaces the usual folder of the embedded one.
    """
    Keys(queue)  # a bad name is refused before anything starts
    if redis_url is not None:
        yield Place(redis_url, queue, tenant)
        return
    with embedded_server(state or state_folder()) as server:
        yield Place(server.url, queue, tenant, server)


def worker_for(
    place: Place, model: str, extra: tuple[str, ...] = ()
) -> Coroutine[Any, Any, None] | None:
    """Return what keeps a worker on the embedded server; None for a server that was given.

    A worker of another command is used for as long as it lives; ``extra`` are more arguments for
    one of our own. Raises ConfigurationError when no worker is installed, and CommandError, while
    it runs, when the worker cannot start.
    """
    if place.embedded is None:
        return None
    worker_program()  # raises before anything is enqueued
    return _keep_served(place, place.embedded, ("--model", model, *extra), model)


def serving_lock(server: EmbeddedServer, queue: str) -> int:
    """Open the lock that a worker of the embedded server holds while it serves a queue."""
    return open_lock(server.folder / f"serving-{queue}.lock")


async def _keep_served(
    place: Place, server: EmbeddedServer, arguments: tuple[str, ...], model: str
) -> None:
    """See to it that the queue has a worker, until cancelled."""
    lock_fd = serving_lock(server, place.queue)
    try:
        async with place.connected() as connection:

            async def is_serving(worker_id: str) -> bool:
                workers = await list_workers(connection, place.keys)
                return any(worker.worker_id == worker_id for worker in workers)

            # The kernel frees the lock of a worker that died; a heartbeat would tell much later.
            while not lock_within(lock_fd, fcntl.LOCK_EX, 0):
                _check_model(await list_workers(connection, place.keys), model)
                heed_cancellation()
                await asyncio.sleep(LOOK_EVERY_S)
            if sys.stderr.isatty():
                render.say(f"starting a worker with {model} …")
            command = WorkerCommand(
                ("--redis-url", place.url, "--queue", place.queue, *arguments),
                server.folder.parent / "worker.log",
                (server.lock_fd, lock_fd),
            )
            await WorkerSupervisor(command, is_serving).keep()
    finally:
        os.close(lock_fd)


def _check_model(workers: tuple[WorkerInfo, ...], model: str) -> None:
    """Refuse to ask one model what was meant for another."""
    path = PurePath(model)
    names = {model, path.name, path.stem, os.environ.get("HEADRACE_SERVED_MODEL_NAME")}
    for worker in workers:
        served_model = worker.facts.get("model")
        if served_model is not None and served_model not in names:
            raise CommandError(
                f"worker {worker.worker_id} serves this queue with model {served_model!r}, not "
                f"{model!r}; stop it, or give --queue another name"
            )
