"""A worker of the command's own: started, watched, started again, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.cli.exits import CommandError
from headrace.cli.keeper import die_with
from headrace.cli.running import heed_cancellation
from headrace.cli.variables import COMMAND_VARIABLES
from headrace.errors import ConfigurationError

START_TIMEOUT_S = 300.0  # loading a large model from a slow disk
STOP_TIMEOUT_S = 20.0
POLL_S = 0.1
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
STABLE_AFTER_S = 60.0  # a worker that lived so long starts again without a pause
LOG_TAIL_LINES = 15
NEEDED_MODULES = ("torch", "transformers", "structlog", "prometheus_client")


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """How the worker is started."""

    arguments: tuple[str, ...]  # of ``python -m headrace_worker``
    log_path: Path  # its stdout and stderr, appended
    lock_fds: tuple[int, ...] = ()  # held for as long as the worker lives


def worker_program() -> tuple[str, ...]:
    """Return the start of every worker's command line; raises ConfigurationError."""
    missing = [name for name in NEEDED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"the worker is not installed ({', '.join(missing)} missing): "
            "pip install 'headrace[worker]'"
        )
    return (sys.executable, "-m", "headrace_worker")


def worker_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that a worker is started with."""
    return {name: value for name, value in environ.items() if name not in COMMAND_VARIABLES}


class WorkerSupervisor:
    """Keeps one worker running; touched on the event loop only.

    ``is_serving`` asks the queue whether the worker of that id lives. One that ends before any has
    served has wrong settings, so it is not started again. One that served and died is, under
    another id, after a pause that doubles up to a cap.
    """

    def __init__(
        self,
        command: WorkerCommand,
        is_serving: Callable[[str], Awaitable[bool]],
        program: Sequence[str] | None = None,
    ) -> None:
        self._command = command
        self._is_serving = is_serving
        self._program = program
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0
        self._has_served = False
        self._worker_id = ""

    async def keep(self) -> None:
        """Run until cancelled; raises CommandError when the worker cannot start."""
        backoff_s = FIRST_BACKOFF_S
        try:
            while True:
                started_s = time.monotonic()
                await self._start()
                await self._wait_until_dead()
                if time.monotonic() - started_s > STABLE_AFTER_S:
                    backoff_s = FIRST_BACKOFF_S
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
        finally:
            await self._stop()

    async def _start(self) -> None:
        program = self._program or worker_program()
        self._worker_id = f"command-{os.getpid()}-{secrets.token_hex(3)}"
        path = self._command.log_path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("ab") as log:
            self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *program,
                *self._command.arguments,
                *("--worker-id", self._worker_id),
                env=worker_environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=self._command.lock_fds,
                start_new_session=True,  # Ctrl-C is the command's to handle
                preexec_fn=partial(die_with, os.getpid()),
            )

    async def _wait_until_dead(self) -> None:
        """Return when a worker that served has ended; raises CommandError when it never served."""
        assert self._process is not None
        ended = asyncio.ensure_future(self._process.wait())
        deadline_s = time.monotonic() + START_TIMEOUT_S
        try:
            while not self._has_served:
                if ended.done():
                    raise CommandError(f"the worker did not start:\n{self._log_tail()}")
                if time.monotonic() > deadline_s:
                    raise CommandError(
                        f"the worker was not ready in {START_TIMEOUT_S:g} s:\n{self._log_tail()}"
                    )
                await asyncio.wait({ended}, timeout=POLL_S)
                self._has_served = await self._is_serving(self._worker_id)
                heed_cancellation()
            await ended
        finally:
            ended.cancel()

    async def _stop(self) -> None:
        """Let the worker hand its requests back; kill it and its kin when it takes too long."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except (TimeoutError, asyncio.CancelledError):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def _log_tail(self) -> str:
        with self._command.log_path.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        shown = "\n".join(f"  {_readable(line)}" for line in lines[-LOG_TAIL_LINES:])
        return f"{shown}\n(all of it: {self._command.log_path})"


def _readable(line: str) -> str:
    """Return a line of the log for people: the event and why, where it is a line of JSON."""
    try:
        facts = json.loads(line)
        return f"{facts['event']}: {facts.get('reason') or facts.get('error') or facts['level']}"
    except (ValueError, TypeError, KeyError):
        return line
