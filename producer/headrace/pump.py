"""Requests of a blocking client under way, and the one blocking read that moves them all."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headrace.assembly import LogAssembly, Opened, StreamAssembly
from headrace.calls import status
from headrace.connections import SYNC_BLOCK_S
from headrace.errors import HeadraceError, ProtocolError, TransportError
from headrace.patience import Patience, delays_s, explain_silence
from headrace.reading import Entries
from headrace.sync_link import SyncLink
from headrace.types import Chunk


class Flight:
    """A request under way: what was read of it, and the clocks of its reader."""

    def __init__(self, opened: Opened, tenant: str, patience: Patience) -> None:
        self.assembly: StreamAssembly = opened.assembly
        self.patience = patience
        self.failure: HeadraceError | None = None  # why nothing more will come
        self.tenant = tenant
        if opened.is_doubtful:
            patience.doubt()

    @property
    def has_news(self) -> bool:
        """Whether there is something for the caller: a chunk, the end, or a failure."""
        assembly = self.assembly
        return bool(assembly.num_ready or assembly.is_finished or self.failure)

    def take(self) -> Chunk | None:
        """Return the next chunk that was read; raises DeadlineExceeded."""
        now_s = time.monotonic()
        if not self.assembly.is_finished:
            self.patience.refuse_overtime(now_s)
        if (chunk := self.assembly.take()) is not None:
            self.patience.heard(now_s)
        return chunk

    def cancel_quietly(self, link: SyncLink) -> None:
        """Cancel what has not ended, for a caller that is leaving."""
        link.cancel_quietly(self.tenant, [log.request_id for log in self.assembly.unfinished])

    def feed(self, log: LogAssembly, entries: Entries) -> None:
        """Take entries of one log; an unreadable one fails this request alone."""
        try:
            self.assembly.feed(log, entries)
        except ProtocolError as error:
            self.failure = error


class Pump:
    """Moves the flights of one thread: one read over all their logs, then their timeouts."""

    def __init__(self, link: SyncLink) -> None:
        self._link = link
        self._delays = delays_s()
        self._was_lost = False  # the last read failed

    def turn(self, flights: Sequence[Flight], at_most_s: float = SYNC_BLOCK_S) -> None:
        """Wait for news of any flight, at most so long or until a clock wants attention.

        Raises TransportError when Redis refuses to be read; an outage is waited out.
        """
        now_s = time.monotonic()
        wait_s = min(
            [SYNC_BLOCK_S, at_most_s, *(flight.patience.wait_s(now_s) for flight in flights)]
        )
        owners = {log: flight for flight in flights for log in flight.assembly.unfinished}
        for log, entries in self._read(owners, wait_s):
            owners[log].feed(log, entries)
        for flight in flights:
            self._attend(flight)

    def _read(
        self, owners: dict[LogAssembly, Flight], wait_s: float
    ) -> list[tuple[LogAssembly, Entries]]:
        try:
            found = self._link.read(owners, wait_s or None)
        except TransportError as error:
            if not error.retryable_later:
                raise
            self._was_lost = True
            time.sleep(min(next(self._delays), wait_s))
            return []
        if self._was_lost:
            self._was_lost, self._delays = False, delays_s()
            for flight in owners.values():
                flight.patience.doubt()
        return found

    def _attend(self, flight: Flight) -> None:
        """Ask what became of a silent request; give up when it is time."""
        if flight.has_news:
            return
        now_s = time.monotonic()
        verdict = flight.patience.verdict(now_s)
        if verdict is None and not flight.patience.is_probe_due(now_s):
            return
        if not self._was_lost:  # otherwise the question would time out as well
            for log in flight.assembly.unfinished:
                self._probe(flight, log)
        if verdict is not None and not flight.has_news:
            flight.failure = verdict

    def _probe(self, flight: Flight, log: LogAssembly) -> None:
        """Ask for the status, then read the log once more; fails the flight where that explains."""
        call = status(self._link.keys, tenant=flight.tenant, request_id=log.request_id)
        try:
            known = self._link.call_once(call)
            found = self._link.read([log], None)
        except TransportError as error:
            if not error.retryable_later:
                flight.failure = error
            return
        if found:
            flight.feed(log, found[0][1])
        elif not log.is_finished:
            flight.failure = explain_silence(known, log)
