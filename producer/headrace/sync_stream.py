"""SyncTokenStream: what TokenStream is, for a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import TracebackType

from headrace.assembly import Opened
from headrace.errors import ConfigurationError, StreamConsumed, StreamUnfinished
from headrace.patience import Patience
from headrace.pump import Flight, Pump
from headrace.sync_link import SyncLink
from headrace.types import Chunk, Completion, Timeout


class SyncTokenStream:
    """Chunks of one request, to be used once: ``with`` around ``for``, in one thread.

    Leaving early cancels the request, unless ``cancel_on_exit`` is False. Iterating raises a
    RequestTimeout when one of the timeouts is over, a RequestError when the answer is "no", and
    TransportError when Redis refuses to be read; an outage of Redis is waited out.
    """

    def __init__(
        self,
        link: SyncLink,
        opening: Callable[[], Opened],
        *,
        request_id: str,
        tenant: str,
        timeout: Timeout,
        cancel_on_exit: bool,
    ) -> None:
        self.request_id = request_id
        self._link = link
        self._opening = opening
        self._tenant = tenant
        self._timeout = timeout
        self._cancel_on_exit = cancel_on_exit
        self._is_consumed = False
        self._pump = Pump(link)
        self._flight: Flight | None = None  # None until it is opened

    @property
    def completion(self) -> Completion:
        """The result; raises StreamUnfinished before the end, and a RequestError at a "no"."""
        if self._flight is None:
            raise StreamUnfinished(f"the stream of request {self.request_id!r} was not opened")
        return self._flight.assembly.completion()

    def read(self) -> Completion:
        """Read to the end and return the result; raises what iterating raises."""
        for _ in self:
            pass
        return self.completion

    def cancel(self) -> None:
        """Cancel the request; the stream then ends with RequestCancelled."""
        for log in self._opened.assembly.unfinished:
            self._link.cancel(self._tenant, log.request_id)

    def __enter__(self) -> SyncTokenStream:
        called_s = time.monotonic()
        opened = self._opening()
        self._flight = Flight(
            opened, self._tenant, Patience(self._timeout, self.request_id, called_s)
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._cancel_on_exit:
            self._opened.cancel_quietly(self._link)

    def __iter__(self) -> Iterator[Chunk]:
        if self._is_consumed:
            raise StreamConsumed(f"the stream of request {self.request_id!r} was iterated before")
        self._is_consumed = True
        return self._chunks(self._opened)

    def _chunks(self, flight: Flight) -> Iterator[Chunk]:
        while (chunk := self._next(flight)) is not None:
            yield chunk

    def _next(self, flight: Flight) -> Chunk | None:
        """Wait for the next chunk; None after the last one."""
        flight.patience.wait_begins(time.monotonic())
        while True:
            if (chunk := flight.take()) is not None:
                return chunk
            if flight.assembly.is_finished:
                flight.assembly.completion()  # raises the request's own error
                return None
            if flight.failure is not None:
                raise flight.failure
            self._pump.turn([flight])

    @property
    def _opened(self) -> Flight:
        if self._flight is None:
            raise ConfigurationError("open the stream first: with client.stream(…) as stream")
        return self._flight
