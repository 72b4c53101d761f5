"""The engine's end of the channel: a blocking socket that speaks frames."""

from __future__ import annotations

import select
import socket
import threading
from typing import Protocol

from headrace_worker.engine.framing import FrameDecoder, Message, encode_frame

_RECEIVE_BYTES = 256 * 1024


class HasFileno(Protocol):
    """What a thread can sleep on."""

    def fileno(self) -> int:
        """Return the descriptor of an open file."""
        ...


class ChannelClosed(ConnectionError):
    """The transport process is gone."""


class Channel:
    """Read by one thread; ``send`` blocks, and so stops the engine, until the other side reads."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(True)
        self._decoder = FrameDecoder()
        self._sending = threading.Lock()  # a frame is written whole, whichever thread has news

    def send(self, message: Message) -> None:
        """Write one frame; raises ChannelClosed."""
        frame = encode_frame(message)
        try:
            with self._sending:
                self._socket.sendall(frame)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the transport process closed the channel") from error

    def receive(self, *, or_until: HasFileno | None = None) -> list[Message]:
        """Sleep until at least one message is complete, or the other file can be read.

        Raises ChannelClosed.
        """
        while True:
            if or_until is not None and self._wait(or_until):
                return []
            if received := self._read():
                return received

    def poll(self) -> list[Message]:
        """Return what has arrived, at once; raises ChannelClosed."""
        try:
            return self._read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []

    def _wait(self, other: HasFileno) -> bool:
        """Sleep until either can be read; return whether the other can."""
        watch = select.poll()
        watch.register(self._socket, select.POLLIN)
        watch.register(other, select.POLLIN)
        return other.fileno() in dict(watch.poll())

    def _read(self, flags: int = 0) -> list[Message]:
        try:
            data = self._socket.recv(_RECEIVE_BYTES, flags)
        except ConnectionResetError as error:
            raise ChannelClosed("the transport process reset the channel") from error
        if not data:
            raise ChannelClosed("the transport process closed the channel")
        return self._decoder.feed(data)
