"""The process that holds an embedded Valkey up for as long as any command uses it.

Run as a script, with the standard library only, so that it starts fast and stays small:

    python keeper.py FOLDER SOCKET SERVER [OPTION ...]

Every command that uses the server holds a shared lock on ``users.lock``. The keeper starts the
server, then waits for the exclusive lock: it gets it when the last user is gone, whether that one
left politely or was killed, and stops the server. A newcomer waits at ``users.lock`` until the old
server is down. ``server.lock`` is held by keeper and server together, so that two servers can never
write one folder, not even when a keeper was killed.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

READY = "ready"
START_TIMEOUT_S = 60.0  # a long log of requests has to be read first
LOCK_TIMEOUT_S = 15.0
POLL_S = 0.01

# Loaded here, since little is safe between fork and exec.
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class StartError(Exception):
    """The server could not be started; the message says why."""


def main(folder: Path, socket_path: str, command: list[str]) -> int:
    """Leave a keeper behind that holds the server; return 0 once the server answers."""
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.close(read_end)
        _become_daemon(folder)
        _run(folder, socket_path, command, write_end)
    os.close(write_end)
    with os.fdopen(read_end) as report:
        word = report.read()
    if word == READY:
        return 0
    sys.stderr.write(word or "the keeper of the embedded server died")
    return 1


def answers_ping(socket_path: str) -> bool:
    """Whether a server listens there, has read its files and serves."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(2.0)
            connection.connect(socket_path)
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False


def lock_within(descriptor: int, kind: int, timeout_s: float) -> bool:
    """Take a flock, waiting at most so long; return whether it was taken."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        else:
            return True


def die_with(parent_pid: int) -> None:
    """Ask Linux to send this process SIGTERM when its parent dies, however it dies."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:  # it died before we asked
            os._exit(1)


def _become_daemon(folder: Path) -> None:
    """Leave the terminal and the caller's pipes; what is printed from here on goes to the log."""
    os.setsid()
    log = os.open(folder / "valkey.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)


def _run(folder: Path, socket_path: str, command: list[str], write_end: int) -> NoReturn:
    with os.fdopen(write_end, "w") as report:
        try:
            server = _start(folder, socket_path, command)
        except (StartError, OSError) as error:
            report.write(str(error))
            report.flush()
            os._exit(1)
        report.write(READY)
    threading.Thread(target=_leave_with, args=(server,), daemon=True).start()
    users = os.open(folder / "users.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(users, fcntl.LOCK_EX)
    server.terminate()
    server.wait()
    os._exit(0)


def _start(folder: Path, socket_path: str, command: list[str]) -> subprocess.Popen[bytes]:
    """Start the server and wait until it answers; raises StartError."""
    lock = os.open(folder / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
    if not lock_within(lock, fcntl.LOCK_EX, LOCK_TIMEOUT_S):
        raise StartError(f"another server still uses {folder}")
    log = folder / "valkey.log"
    log_start = log.stat().st_size
    server = subprocess.Popen(
        command,
        cwd=folder,
        pass_fds=(lock,),
        start_new_session=True,
        preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - no second thread runs yet
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    while not answers_ping(socket_path):
        if server.poll() is not None:
            said = log.read_bytes()[log_start:].decode(errors="replace").splitlines()[-8:]
            raise StartError("\n".join([f"the server ended with {server.returncode}:", *said]))
        if time.monotonic() > deadline:
            server.kill()
            raise StartError(f"the server gave no answer in {START_TIMEOUT_S:g} s; see {log}")
        time.sleep(POLL_S)
    return server


def _leave_with(server: subprocess.Popen[bytes]) -> NoReturn:
    """End the keeper when its server has ended by itself."""
    os._exit(server.wait() and 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
