"""Many requests at a time from one thread: fill up, read over all of them, yield what ended."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

from headrace.assembly import Opened
from headrace.bulk import DraftMaker, Item
from headrace.core import ClientCore
from headrace.errors import Overloaded, RequestError, RequestTimeout
from headrace.patience import Patience
from headrace.pump import Flight, Pump
from headrace.submission import Submission
from headrace.sync_link import SyncLink
from headrace.types import Completion, Timeout

Outcome = Completion | RequestError | RequestTimeout


class Bulk:
    """One run of generate_many."""

    def __init__(
        self,
        core: ClientCore,
        link: SyncLink,
        drafts: DraftMaker,
        *,
        timeout: Timeout,
        cancel_on_exit: bool,
    ) -> None:
        self._core = core
        self._link = link
        self._drafts = drafts
        self._timeout = timeout
        self._cancel_on_exit = cancel_on_exit
        self._pump = Pump(link)
        self._flights: list[Flight] = []
        self._held: _Held | None = None  # what a full queue refused; nothing overtakes it

    def run(
        self, items: Iterable[Item], max_in_flight: int, *, return_errors: bool
    ) -> Generator[Outcome, None, None]:
        """Yield outcomes as they come; raises the first failure unless it is to be returned."""
        try:
            for outcome in self._outcomes(iter(items), max_in_flight):
                if not return_errors and isinstance(outcome, Exception):
                    raise outcome
                yield outcome
        finally:
            if self._cancel_on_exit:
                for flight in self._flights:
                    flight.cancel_quietly(self._link)

    def _outcomes(self, items: Iterator[Item], max_in_flight: int) -> Iterator[Outcome]:
        has_more = True
        while has_more or self._flights or self._held:
            while has_more and not self._held and len(self._flights) < max_in_flight:
                try:
                    item = next(items)
                except StopIteration:
                    has_more = False
                    break
                yield from self._launch(item)
            yield from self._turn()

    def _launch(self, item: Item) -> Iterator[Outcome]:
        """Send one item; yields only where the answer is "no" at once."""
        draft = self._drafts.make(item)
        try:
            submission = self._core.prepare(draft.prompt, draft.options, attached=False)
        except RequestError as error:
            yield error
        else:
            yield from self._send(submission, time.monotonic())

    def _send(self, submission: Submission, since_s: float) -> Iterator[Outcome]:
        now_s = time.monotonic()
        try:
            has_ended = self._link.enqueue(submission, withdraw=self._cancel_on_exit)
        except Overloaded as error:
            again_s, total_s = now_s + error.retry_after_s, self._timeout.total
            if total_s is not None and again_s >= since_s + total_s:
                yield error
            else:
                self._held = _Held(submission, since_s, again_s)
        except RequestError as error:
            yield error
        else:
            opened = Opened(self._core.assemble(submission), has_ended)
            patience = Patience(self._timeout, submission.request_id, now_s)
            self._flights.append(Flight(opened, submission.tenant, patience))

    def _turn(self) -> Iterator[Outcome]:
        """Wait for news, send what was held back, yield what ended."""
        wait_s = math.inf if self._held is None else self._held.again_s - time.monotonic()
        if self._flights:
            self._pump.turn(self._flights, at_most_s=max(0.0, wait_s))
        elif self._held is not None:
            time.sleep(max(0.0, wait_s))
        if (held := self._held) is not None and time.monotonic() >= held.again_s:
            self._held = None
            yield from self._send(held.submission, held.since_s)
        for flight in list(self._flights):
            if (outcome := _outcome(flight)) is not None:
                self._flights.remove(flight)
                if self._cancel_on_exit:
                    flight.cancel_quietly(self._link)  # what a timeout or an error left unfinished
                yield outcome


@dataclass(frozen=True, slots=True)
class _Held:
    submission: Submission
    since_s: float  # monotonic: first try
    again_s: float  # monotonic: next try


def _outcome(flight: Flight) -> Outcome | None:
    """Take what was read; return how the request ended, None while it goes on."""
    try:
        while flight.take() is not None:
            pass
        if flight.failure is not None:
            raise flight.failure
        return flight.assembly.completion() if flight.assembly.is_finished else None
    except (RequestError, RequestTimeout) as error:
        return error
