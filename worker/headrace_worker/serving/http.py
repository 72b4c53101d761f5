"""Three pages over HTTP/1.1: /metrics, /healthz, /readyz.

They are answered by the event loop that does the work, so a loop that hangs fails its probe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from prometheus_client import CONTENT_TYPE_LATEST

from headrace.errors import ConfigurationError
from headrace_worker.serving.metrics import Metrics

_REQUEST_TIMEOUT_S = 5.0  # a client that sends nothing does not hold a connection
_MAX_HEAD_BYTES = 8 * 1024
_TEXT = "text/plain; charset=utf-8"
_STATUS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class _Page:
    status: int
    body: bytes
    content_type: str = _TEXT


class MetricsServer:
    """Serves one worker's pages: ``async with MetricsServer(metrics, unready=...) as server``."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        unready: Callable[[], Sequence[str]],  # what work still waits for; empty when ready
        host: str = "127.0.0.1",
        port: int = 0,  # 0: any free one
    ) -> None:
        self._metrics = metrics
        self._unready = unready
        self._host = host
        self._wanted_port = port
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port that it listens on; raises RuntimeError before the start."""
        if self._server is None:
            raise RuntimeError("the metrics server is not running")
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Listen; raises ConfigurationError when the address cannot be had."""
        try:
            self._server = await asyncio.start_server(
                self._answer, self._host, self._wanted_port, limit=_MAX_HEAD_BYTES
            )
        except OSError as error:
            address = f"{self._host}:{self._wanted_port}"
            raise ConfigurationError(f"--metrics-port: {address}: {error.strerror}") from error

    async def stop(self) -> None:
        """Stop listening; may be called twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            await server.wait_closed()

    async def __aenter__(self) -> MetricsServer:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request a connection."""
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                writer.write(await self._read_and_route(reader))
                await writer.drain()
        except (TimeoutError, ConnectionError):
            pass  # the client's problem, and it is gone
        finally:
            writer.close()

    async def _read_and_route(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, _ = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            return _encode(_Page(400, b"bad request\n"))
        if method not in ("GET", "HEAD"):
            return _encode(_Page(405, b"only GET and HEAD\n"))
        return _encode(self._route(target.partition("?")[0]), with_body=method == "GET")

    def _route(self, path: str) -> _Page:
        if path == "/metrics":
            return _Page(200, self._metrics.render(), CONTENT_TYPE_LATEST)
        if path == "/healthz":
            return _Page(200, b"ok\n")
        if path == "/readyz":
            waits_for = self._unready()
            body = "".join(f"{reason}\n" for reason in waits_for) or "ok\n"
            return _Page(503 if waits_for else 200, body.encode())
        return _Page(404, b"not found: /metrics, /healthz, /readyz\n")


def _encode(page: _Page, *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {page.status} {_STATUS[page.status]}\r\n"
        f"Content-Type: {page.content_type}\r\n"
        f"Content-Length: {len(page.body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + (page.body if with_body else b"")
