"""The proxy that tests put before a server does what it says to connections and replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.tcp_proxy import TcpProxy
from support.waiting import PATIENCE_S


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[TcpProxy]:
    """Stand before a server that answers every line with the same line."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    upstream = tmp_path / "echo.sock"
    async with await asyncio.start_unix_server(echo, upstream), TcpProxy(upstream) as proxy:
        yield proxy


class _Peer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, line: bytes, timeout_s: float = PATIENCE_S) -> bytes:
        self.writer.write(line)
        return await asyncio.wait_for(self.reader.readline(), timeout_s)


@pytest.fixture
async def peer(proxy: TcpProxy) -> AsyncIterator[_Peer]:
    """Connect through the proxy."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    yield _Peer(reader, writer)
    writer.close()


async def test_it_passes_on_what_it_gets(peer: _Peer) -> None:
    """Left alone, it is invisible."""
    assert await peer.ask(b"one\n") == b"one\n"
    assert await peer.ask(b"two\n") == b"two\n"


async def test_it_loses_the_reply_that_was_counted(proxy: TcpProxy, peer: _Peer) -> None:
    """The n-th reply from now never comes; the connection ends instead."""
    await peer.ask(b"zero\n")
    proxy.swallow_reply(2)
    assert await peer.ask(b"one\n") == b"one\n"
    assert await peer.ask(b"two\n") == b""
    assert proxy.num_swallowed == 1


async def test_it_loses_the_replies_to_what_was_named(proxy: TcpProxy, peer: _Peer) -> None:
    """Other requests are answered as before."""
    proxy.lose_replies(b"two")
    assert await peer.ask(b"one\n") == b"one\n"
    assert await peer.ask(b"two\n") == b""
    assert proxy.num_swallowed == 1


async def test_it_delays_replies(proxy: TcpProxy, peer: _Peer) -> None:
    """Every reply takes that much longer."""
    proxy.delay_s = 0.05
    began = time.monotonic()
    await peer.ask(b"one\n")
    assert time.monotonic() - began >= 0.05


async def test_it_goes_silent(proxy: TcpProxy, peer: _Peer) -> None:
    """Nothing passes and nothing closes, as when a cable is cut."""
    proxy.is_silent = True
    with pytest.raises(TimeoutError):
        await peer.ask(b"one\n", timeout_s=0.05)


async def test_it_resets_connections(proxy: TcpProxy, peer: _Peer) -> None:
    """Peers see a reset, not an orderly end."""
    await peer.ask(b"one\n")
    proxy.reset_all()
    with pytest.raises(ConnectionResetError):
        await peer.reader.readline()


async def test_it_cuts_replies_into_pieces(proxy: TcpProxy, peer: _Peer) -> None:
    """A reply in slices of one byte is the same reply."""
    proxy.slice_bytes = 1
    assert await peer.ask(b"one\n") == b"one\n"


async def test_it_holds_a_bandwidth(proxy: TcpProxy, peer: _Peer) -> None:
    """Ten bytes at a hundred a second take a tenth of a second."""
    proxy.bytes_per_s = 100
    started = time.monotonic()
    await peer.ask(b"123456789\n")
    assert time.monotonic() - started >= 0.1


async def test_a_late_request_arrives_though_its_sender_has_left(proxy: TcpProxy) -> None:
    """What was sent before the end of a connection reaches the server after the delay."""
    proxy.request_delay_s = 0.05
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"late\n")
    writer.write_eof()
    assert await asyncio.wait_for(reader.readline(), PATIENCE_S) == b"late\n"
    writer.close()


async def test_a_half_closed_connection_gives_no_reply(proxy: TcpProxy, peer: _Peer) -> None:
    """The client sees an end, though nobody has refused its request."""
    await peer.ask(b"one\n")
    proxy.half_close_all()
    assert await peer.ask(b"two\n") == b""
