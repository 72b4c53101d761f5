"""The bridge to the engine process: one child, one socket, one frame for each message.

The child inherits its end of a socket pair. When this process dies, however it dies, the child sees
the end of the channel and leaves; when the child dies, we do, and ``receive`` says so by returning
nothing. What it said last is read all the same: a write to a dead child fails on a connection of
its own, and takes nothing from the one that is read.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from headrace_worker.engine.environment import engine_environment
from headrace_worker.engine.framing import FrameDecoder, Message, encode_frame
from headrace_worker.engine.messages import (
    Bystanders,
    Command,
    EngineFailed,
    EngineReady,
    Pong,
    Report,
    Shutdown,
    StepOutcome,
)
from headrace_worker.engine.settings import EngineSettings

_RECEIVE_BYTES = 256 * 1024


class EngineStartFailed(Exception):
    """The engine could not load; the message is its reason."""


class EngineBridge:
    """Touched on the event loop only."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        *,
        reading: asyncio.StreamWriter,  # of the connection that is read, to end it with
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._reading = reading
        self._writer = writer
        self._decoder = FrameDecoder()

    @classmethod
    async def start(cls, argv: Sequence[str], settings: EngineSettings) -> EngineBridge:
        """Start the child and send it its settings; it loads while we go on."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                "--fd",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=engine_environment(),
                start_new_session=True,  # a terminal's Ctrl-C is for us; we drain first
            )
        except OSError as error:
            ours.close()
            raise EngineStartFailed(f"{argv[0]}: {error}") from error
        finally:
            theirs.close()
        reader, reading = await asyncio.open_connection(sock=ours.dup())
        _, writer = await asyncio.open_connection(sock=ours)
        # A socket's transport reads, too; without its settings the child has said nothing yet.
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(encode_frame(settings))
        return cls(process, reader, reading=reading, writer=writer)

    async def wait_ready(self) -> EngineReady:
        """Return the first report of an engine that has loaded; raises EngineStartFailed."""
        match await self.receive():
            case [EngineReady() as ready, *_]:
                return ready
            case [EngineFailed(message), *_]:
                raise EngineStartFailed(message)
            case _:
                raise EngineStartFailed(f"{await self.exit_reason()} while loading")

    async def receive(self) -> list[Report]:
        """Return what arrived, at least one report; nothing when the engine is gone."""
        while True:
            try:
                data = await self._reader.read(_RECEIVE_BYTES)
            except ConnectionError:
                return []
            if not data:
                return []
            if messages := self._decoder.feed(data):
                return [_check_report(message) for message in messages]

    def send(self, command: Command) -> None:
        """Queue a command; one that a dying engine never reads is lost with it."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(command))

    async def stop(self, grace_s: float) -> None:
        """Let the current step end, then see to it that no child is left."""
        self.send(Shutdown())
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        finally:
            self.kill()
        await self._process.wait()

    def kill(self) -> None:
        """End the child at once; ``receive`` returns nothing from then on, even if it lingers."""
        if self._process.returncode is None:
            self._process.kill()
        self._writer.transport.abort()
        self._reading.transport.abort()

    async def exit_reason(self) -> str:
        """Say how the child ended."""
        code = await self._process.wait()
        return f"killed by signal {-code}" if code < 0 else f"exited with status {code}"


def _check_report(message: Message) -> Report:
    reports = EngineReady | StepOutcome | Bystanders | Pong | EngineFailed
    assert isinstance(message, reports), message
    return message
