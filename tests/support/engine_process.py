"""Starts an engine process as the bridge does, and talks to it with a deadline."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from headrace_worker.engine.framing import FrameDecoder, Message, encode_frame
from headrace_worker.engine.settings import EngineSettings
from support.waiting import PATIENCE_S

FAKE_ENGINE = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))
REAL_ENGINE = (sys.executable, "-m", "headrace_worker.engine.process")
_M = TypeVar("_M")


class EngineProcess:
    """The parent's side: a child, and a socket to it."""

    def __init__(self, child: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.child = child
        self.socket = sock
        self._decoder = FrameDecoder()
        self._arrived: list[Message] = []

    def send(self, *messages: Message) -> None:
        """Write these messages in one go."""
        self.socket.sendall(b"".join(map(encode_frame, messages)))

    def receive(self, kind: type[_M], timeout_s: float = PATIENCE_S) -> _M:
        """Return the next message of one kind and drop those before it."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            while self._arrived:
                message = self._arrived.pop(0)
                if isinstance(message, kind):
                    return message
            self.socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            data = self.socket.recv(65536)
            if not data:
                raise ConnectionError(f"the engine closed the channel before a {kind.__name__}")
            self._arrived += self._decoder.feed(data)

    def receive_until(self, kind: type[_M], is_last: Callable[[_M], bool]) -> list[_M]:
        """Collect messages of one kind up to the one that fulfils the condition."""
        received = [self.receive(kind)]
        while not is_last(received[-1]):
            received.append(self.receive(kind))
        return received

    @property
    def cpu_s(self) -> float:
        """Processor time that the child has used."""
        fields = Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100


@contextmanager
def start_engine(
    *args: str, command: tuple[str, ...] = FAKE_ENGINE, settings: EngineSettings | None = None
) -> Iterator[EngineProcess]:
    """Start a child and send it its settings; whatever happens, no child is left behind."""
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [*command, *args, "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    engine = EngineProcess(child, ours)
    try:
        engine.send(settings or EngineSettings(model="fake", max_model_len=256))
        yield engine
    finally:
        child.kill()
        child.wait()
        ours.close()
