"""The supervisor of a command's own worker, over small programs that behave in every bad way."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.cli import supervisor as module
from headrace.cli.exits import CommandError
from headrace.cli.supervisor import WorkerCommand, WorkerSupervisor, worker_program
from headrace.errors import ConfigurationError
from support.waiting import eventually_async

# Says its pid and id, then does what its first argument is.
PROGRAM = """
import json, os, signal, sys, time
print(json.dumps({"event": "program.started", "pid": os.getpid(), "level": "info"}), flush=True)
print(json.dumps({"event": "worker.stopped", "reason": "it is Monday"}), flush=True)
"""


def program(body: str) -> tuple[str, ...]:
    """The command line of a program with this behaviour."""
    return (sys.executable, "-c", PROGRAM + body)


FOREVER = "time.sleep(60)"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n" + FOREVER
POLITE = (
    "signal.signal(signal.SIGTERM, lambda *_: (print('goodbye'), sys.exit(0)))\n"
    "print('polite', flush=True)\n" + FOREVER
)


class Watched:
    """A supervisor at work, and what its workers wrote."""

    def __init__(self, folder: Path, body: str, is_serving: Callable[[str], Awaitable[bool]]):
        self.log_path = folder / "state" / "worker.log"
        command = WorkerCommand(("--flag",), self.log_path)
        self.supervisor = WorkerSupervisor(command, is_serving, program(body))

    @property
    def log(self) -> str:
        """All that was written."""
        return self.log_path.read_text() if self.log_path.exists() else ""

    @property
    def num_starts(self) -> int:
        """How often a worker came up."""
        return self.log.count("program.started")

    def pids(self) -> list[int]:
        """The workers' process ids, in the order of their starts."""
        words = self.log.replace(",", " ").split()
        return [int(words[at + 1]) for at, word in enumerate(words) if word == '"pid":']


async def always(worker_id: str) -> bool:
    """A queue in which every worker shows up at once."""
    return True


async def never(worker_id: str) -> bool:
    """A queue in which no worker ever shows up."""
    return False


@asynccontextmanager
async def watched(
    folder: Path, body: str, is_serving: Callable[[str], Awaitable[bool]] = always
) -> AsyncIterator[Watched]:
    """Keep a worker while the block lasts."""
    made = Watched(folder, body, is_serving)
    task = asyncio.ensure_future(made.supervisor.keep())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not merely waited for."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def wrote(made: Watched, word: str, times: int = 1) -> None:
    """Wait until workers have written a word so often."""

    async def enough() -> bool:
        return made.log.count(word) >= times

    await eventually_async(enough)


async def test_a_worker_is_stopped_with_its_command(tmp_path: Path) -> None:
    """It gets SIGTERM and the time to say goodbye."""
    async with watched(tmp_path, POLITE) as made:
        await wrote(made, "polite")
        [pid] = made.pids()
        assert is_alive(pid)
    assert not is_alive(pid)
    assert made.log.endswith("goodbye\n")


async def test_a_worker_that_will_not_stop_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its time it is gone, whatever it does with signals."""
    monkeypatch.setattr(module, "STOP_TIMEOUT_S", 0.1)
    async with watched(tmp_path, STUBBORN) as made:
        await wrote(made, "deaf")
        [pid] = made.pids()
    assert not is_alive(pid)


async def test_a_worker_that_served_and_died_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again, and each time under an id of its own."""
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.01)
    ids: list[str] = []

    async def serving(worker_id: str) -> bool:
        ids.append(worker_id)
        return True

    async with watched(tmp_path, "print(sys.argv); sys.exit(1)", serving) as made:
        await wrote(made, "program.started", 3)
    assert len({line for line in made.log.splitlines() if "command-" in line}) >= 3
    assert ids[0].startswith(f"command-{os.getpid()}-")


async def test_pauses_between_starts_grow_to_a_cap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that dies at once does not keep the machine busy."""
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(module, "LONGEST_BACKOFF_S", 0.003)
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(module.asyncio, "sleep", noted)
    made = Watched(tmp_path, "sys.exit(1)", always)
    task = asyncio.ensure_future(made.supervisor.keep())
    while len([p for p in pauses if p < 0.004]) < 4:
        await asyncio.wait({task}, timeout=0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [p for p in pauses if p < 0.004][:4] == [0.001, 0.002, 0.003, 0.003]


async def test_a_worker_that_never_served_is_the_end(tmp_path: Path) -> None:
    """Its last words are in the error, readable, with the place of the whole log."""
    made = Watched(tmp_path, "print('plain words'); sys.exit(3)", never)
    with pytest.raises(CommandError) as raised:
        await made.supervisor.keep()
    said = str(raised.value)
    assert said.startswith("the worker did not start:\n")
    assert "  worker.stopped: it is Monday\n" in said
    assert "  plain words\n" in said
    assert str(made.log_path) in said
    assert made.num_starts == 1


async def test_only_the_words_of_this_start_are_shown(tmp_path: Path) -> None:
    """The log is appended to, and the error leaves out what earlier workers wrote."""
    made = Watched(tmp_path, "sys.exit(1)", never)
    made.log_path.parent.mkdir()
    made.log_path.write_text("an older worker\n")
    with pytest.raises(CommandError) as raised:
        await made.supervisor.keep()
    assert "an older worker" not in str(raised.value)
    assert made.log.startswith("an older worker\n")


async def test_a_worker_that_does_not_get_ready_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that takes too long is an error, and the worker is stopped."""
    monkeypatch.setattr(module, "START_TIMEOUT_S", 0.0)
    made = Watched(tmp_path, FOREVER, never)
    with pytest.raises(CommandError, match="was not ready in 0 s"):
        await made.supervisor.keep()
    assert all(not is_alive(pid) for pid in made.pids())


async def test_a_worker_inherits_the_locks_of_its_command(tmp_path: Path) -> None:
    """The descriptors are open in the worker, so it holds the server up by itself."""
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    command = WorkerCommand((), tmp_path / "worker.log", (lock,))
    body = f"print(os.fstat({lock}).st_ino, flush=True)\n" + FOREVER
    supervisor = WorkerSupervisor(command, always, program(body))
    task = asyncio.ensure_future(supervisor.keep())
    inode = str(os.fstat(lock).st_ino)

    async def is_said() -> bool:
        return (tmp_path / "worker.log").exists() and inode in (tmp_path / "worker.log").read_text()

    await eventually_async(is_said)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    os.close(lock)


def test_the_worker_program_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All missing modules are named at once, with the command that brings them."""
    assert worker_program() == (sys.executable, "-m", "headrace_worker")
    monkeypatch.setattr(module, "NEEDED_MODULES", ("no_such_a", "torch", "no_such_b"))
    with pytest.raises(ConfigurationError, match=r"no_such_a, no_such_b missing.*\[worker\]"):
        worker_program()
