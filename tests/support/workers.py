"""Worker processes as users start them, ``python -m headrace_worker``, over the fake engine."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.folders import cache_folder
from headrace_worker.serving.tokenizer import CONFIG_FILE, VOCABULARY_FILE
from headrace_worker.serving.tokenizer_store import fingerprint
from support.engine_process import FAKE_ENGINE
from support.tokenizers import CONFIG, byte_level_backend
from support.waiting import PATIENCE_S, eventually

MODEL_NAME = "fake"
LEASE_S = 20.0  # of workers that live: a busy machine must not take one for dead
SHORT_LEASE_S = 1.5  # where a test waits for a lease to run out
SHORT_LEASE = ("--lease-ttl", f"{SHORT_LEASE_S}s")


class WorkerProcess:
    """One started worker; its log lines are read back as events."""

    def __init__(self, child: subprocess.Popen[bytes], log: Path) -> None:
        self.child = child
        self._log = log

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return its log lines so far, all or those of one event."""
        lines = self._log.read_text().splitlines()
        events = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [event for event in events if name in (None, event["event"])]

    def wait_for(
        self, name: str, count: int = 1, timeout_s: float = PATIENCE_S
    ) -> list[dict[str, Any]]:
        """Return the events of a name once there are so many."""

        def found() -> list[dict[str, Any]] | None:
            events = self.events(name)
            return events if len(events) >= count else None

        try:
            events = eventually(found, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"no {name} within {timeout_s} s in:\n{self.output}") from error
        assert events is not None
        return events

    def wait_until_ready(self) -> None:
        """Return when it claims."""
        self.wait_for("kv_cache.allocated")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the worker, not to its engine."""
        self.child.send_signal(number)

    def kill(self) -> None:
        """End it at once."""
        self.child.kill()
        self.child.wait()

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Return its exit status."""
        try:
            return self.child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.output}") from None

    @property
    def output(self) -> str:
        """All that it has written."""
        return self._log.read_text()


class WorkerFarm:
    """Starts workers of one queue and leaves none behind."""

    def __init__(self, folder: Path, url: str, queue: str) -> None:
        self._folder = folder
        self._url = url
        self._queue = queue
        self._workers: list[WorkerProcess] = []
        self._model = make_model(folder)
        self._gate = folder / "gate"

    def open_gate(self) -> None:
        """Let the fake engines that wait at their gate go on, now and later."""
        self._gate.touch()

    def start(
        self,
        *flags: str,
        engine: Sequence[str] = (),
        url: str | None = None,
        command: Sequence[str] | None = None,
        env: dict[str, str] | None = None,
    ) -> WorkerProcess:
        """Start one; ``engine`` are options of the fake engine."""
        number = len(self._workers) + 1
        log = self._folder / f"worker-{number}.log"
        program = command or (sys.executable, "-m", "headrace_worker")
        with log.open("wb") as output:
            child = subprocess.Popen(
                [*program, *flags], stderr=output, env=self._env(number, url, engine, env or {})
            )
        self._workers.append(WorkerProcess(child, log))
        return self._workers[-1]

    def ready(self, *flags: str, engine: Sequence[str] = (), **options: Any) -> WorkerProcess:
        """Start one and wait until it claims."""
        worker = self.start(*flags, engine=engine, **options)
        worker.wait_until_ready()
        return worker

    @property
    def workers(self) -> tuple[WorkerProcess, ...]:
        """All that were ever started, dead ones included."""
        return tuple(self._workers)

    def close(self) -> None:
        """Kill what still runs."""
        for worker in self._workers:
            if worker.child.poll() is None:
                worker.send(signal.SIGCONT)
                worker.kill()

    def _env(
        self, number: int, url: str | None, engine: Sequence[str], extra: dict[str, str]
    ) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        gate = ("--gate", str(self._gate))
        return {
            **inherited,
            "HEADRACE_REDIS_URL": url or self._url,
            "HEADRACE_QUEUE": self._queue,
            "HEADRACE_MODEL": str(self._model),
            "HEADRACE_SERVED_MODEL_NAME": MODEL_NAME,
            "HEADRACE_WORKER_ID": f"worker-{number}",
            "HEADRACE_LEASE_TTL": f"{LEASE_S}s",
            "HEADRACE_MAX_NUM_SEQS": "8",
            "HEADRACE_ENGINE_COMMAND": shlex.join((*FAKE_ENGINE, *gate, *engine)),
            "HEADRACE_CACHE_DIR": str(self._folder / "cache"),
            "HEADRACE_LOG_LEVEL": "debug",
            "HEADRACE_LOG_FORMAT": "json",
            **extra,
        }


@contextmanager
def worker_farm(folder: Path, url: str, queue: str) -> Iterator[WorkerFarm]:
    """Give a farm whose workers are all gone afterwards."""
    farm = WorkerFarm(folder, url, queue)
    try:
        yield farm
    finally:
        farm.close()


def seconds_since(event: dict[str, Any]) -> float:
    """Return how long ago a logged event was."""
    return time.time() - datetime.fromisoformat(event["timestamp"]).timestamp()


def make_model(folder: Path) -> Path:
    """Make a model folder that the fake engine serves: byte tokens, and a tokenizer in the cache.

    The tokenizer is put where its export would have put it, so no worker has to run that; kernels
    are those of the machine's own cache, so none has to compile them either.
    """
    model = folder / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"")
    cached = folder / "cache" / "tokenizers" / fingerprint(model)
    cached.mkdir(parents=True)
    byte_level_backend().save(str(cached / VOCABULARY_FILE))
    (cached / CONFIG_FILE).write_text(CONFIG.to_json())
    (kernels := cache_folder() / "kernels").mkdir(parents=True, exist_ok=True)
    (folder / "cache" / "kernels").symlink_to(kernels)
    return model
