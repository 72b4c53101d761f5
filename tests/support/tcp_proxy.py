"""A TCP proxy in front of a server that loses, delays and cuts what passes through it.

It listens on a loopback port of its own and sends on to a Unix socket. A reply here is what the
server sends in answer to one request of the client, seen as one read: enough for request-response
traffic, which is all that the tests send through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from pathlib import Path
from types import TracebackType

CHUNK_BYTES = 65536
LAST_REPLIES_S = 1.0  # the server's time to answer a client that has stopped asking


class TcpProxy:
    """Use it as an async context manager; its switches act on all connections, at once."""

    def __init__(self, upstream: Path) -> None:
        self.delay_s = 0.0  # added to every reply
        self.request_delay_s = 0.0  # added to every request; it arrives though its sender has left
        self.slice_bytes: int | None = None  # replies come in pieces of so many bytes
        self.bytes_per_s: float | None = None  # of the replies on each connection
        self.is_silent = False  # takes everything, passes nothing on, closes nothing
        self.num_swallowed = 0  # replies lost so far
        self.num_connections = 0  # accepted so far
        self.num_refusals = 0  # replies so far that were errors
        self._upstream = upstream
        self._swallow: set[int] = set()  # numbers of replies still to be lost, counted from 1
        self._lose_after: bytes | None = None  # what a request holds whose reply is lost
        self._times_left = 0
        self._num_replies = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """Loopback port that the proxy listens on."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        """Address for redis.from_url."""
        return f"redis://127.0.0.1:{self.port}/0"

    def swallow_reply(self, number: int = 1) -> None:
        """Lose the reply that comes in ``number`` replies' time, and close its connection.

        The server has done the work by then; the client only sees the connection end.
        """
        self._swallow.add(self._num_replies + number)

    def lose_replies(self, request_part: bytes, times: int = 1) -> None:
        """Lose the replies to the next requests that hold these bytes, as swallow_reply does."""
        self._lose_after = request_part
        self._times_left = times

    def reset_all(self) -> None:
        """End every connection with a TCP reset."""
        for writer in list(self._writers):
            _reset(writer)

    def half_close_all(self) -> None:
        """Say on every connection that no more replies come, and go on taking requests."""
        for writer in list(self._writers):
            with contextlib.suppress(OSError):
                writer.write_eof()

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        self._writers.add(writer)
        try:
            await self._join(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the peer left, or the test is over: either way this connection is done
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(str(self._upstream))
        doomed = asyncio.Event()  # the next reply on this connection is to be lost
        pumps = [
            asyncio.create_task(self._pass_requests(reader, server_writer, doomed)),
            asyncio.create_task(self._pass_replies(server_reader, writer, doomed)),
        ]
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            if pumps[0] in done and pumps[0].exception() is None:  # the client said its last word
                server_writer.write_eof()
                await asyncio.wait(pumps[1:], timeout=LAST_REPLIES_S)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            server_writer.close()

    async def _pass_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, doomed: asyncio.Event
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if self.is_silent:
                continue
            if self._times_left and self._lose_after is not None and self._lose_after in data:
                self._times_left -= 1
                doomed.set()
            if self.request_delay_s:
                await asyncio.sleep(self.request_delay_s)
            writer.write(data)
            await writer.drain()

    async def _pass_replies(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, doomed: asyncio.Event
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            self._num_replies += 1
            self.num_refusals += data.startswith(b"-")
            if doomed.is_set() or self._num_replies in self._swallow:
                self._swallow.discard(self._num_replies)
                self.num_swallowed += 1
                return
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if not self.is_silent:
                await self._deliver(data, writer)

    async def _deliver(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        step = self.slice_bytes or len(data)
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            await asyncio.sleep(len(piece) / self.bytes_per_s if self.bytes_per_s else 0)
            writer.write(piece)
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        connection: socket.socket = writer.get_extra_info("socket")
        # Linger on, for no time: close() then sends RST instead of FIN.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
