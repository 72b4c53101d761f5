"""Stop strings in a stream of text: what may be shown, what must wait, and where the end is.

Text that could still turn into a stop string is held back, so nothing that was shown is ever taken
back. The match that ends first wins; of those that end together the longest, since the output ends
before it::

    stop = ["xyz", "y"]     "w" shown · "x" held · "y" ends a match  →  the output is "wx"

or, with ``include_stop``, behind it: then it is "wxy".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scan:
    """What one more piece of text made certain."""

    text: str  # safe to show now
    matched: bool  # a stop string ended in this piece; ``text`` ends before or with it


class StopScanner:
    """Watches one output; made anew by feeding it the same pieces in the same order."""

    def __init__(self, stop: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stop = stop  # none of them empty
        self._include_stop = include_stop  # the output ends with the stop string, not before it
        self._longest = max(map(len, stop), default=0)  # characters
        self._held = ""  # tail of the text that begins a stop string

    def feed(self, text: str, *, may_stop: bool = True) -> Scan:
        """Take the next piece; with ``may_stop`` false a match is ordinary text."""
        window = self._held + text
        end = self._find_end(window) if may_stop else None
        if end is not None:
            self._held = ""
            return Scan(window[:end], matched=True)
        cut = len(window) - self._num_undecided(window)
        self._held = window[cut:]
        return Scan(window[:cut], matched=False)

    def flush(self) -> str:
        """Return what is still held; the output is over, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _find_end(self, window: str) -> int | None:
        """Return where the output ends: where the winning match starts, or ends."""
        matches = [
            (start + len(stop), start)
            for stop in self._stop
            # A match inside the held text alone was seen before, and was not allowed to stop.
            if (start := window.find(stop, max(0, len(self._held) - len(stop) + 1))) >= 0
        ]
        if not matches:
            return None
        end, start = min(matches)
        return end if self._include_stop else start

    def _num_undecided(self, window: str) -> int:
        """Return the length of the longest tail that a stop string begins with."""
        for length in range(min(len(window), self._longest - 1), 0, -1):
            tail = window[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stop):
                return length
        return 0
