"""Back-pressure: when Redis takes tokens slower than the engine makes them, the engine waits."""

from __future__ import annotations

from collections.abc import Callable

from headrace_worker.serving.reporting import Reporter


class Pressure:
    """Pauses decoding at ``most_tokens`` unacknowledged tokens; it goes on at half of that."""

    def __init__(
        self, most_tokens: int, set_paused: Callable[[bool], None], reporter: Reporter
    ) -> None:
        self._most_tokens = most_tokens
        self._set_paused = set_paused
        self._report = reporter
        self.is_paused = False

    def update(self, num_unacknowledged: int) -> None:
        """Take the present count of tokens that exist only in this process."""
        if not self.is_paused and num_unacknowledged >= self._most_tokens:
            self._report.paused(num_unacknowledged)
            self._change(paused=True)
        elif self.is_paused and num_unacknowledged <= self._most_tokens // 2:
            self._change(paused=False)

    def engine_started(self) -> None:
        """A new engine is not paused."""
        self.is_paused = False

    def _change(self, *, paused: bool) -> None:
        self.is_paused = paused
        self._set_paused(paused)
