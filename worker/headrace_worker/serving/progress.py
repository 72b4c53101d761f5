"""Is the engine alive? It must report a step or answer a ping within the hang limit.

Leases are renewed only while it does, so a hung device loses its requests to another worker even
though this process is well. Silence does not count after this process itself was stopped: it could
not have heard.
"""

from __future__ import annotations


class ProgressWatch:
    """Pure; times are monotonic seconds."""

    def __init__(self, hang_limit_s: float, look_every_s: float) -> None:
        self._hang_limit_s = hang_limit_s
        self._longest_look_s = 4 * look_every_s  # beyond it this process was stopped, or starved
        self._last_report_at: float | None = None  # None: no engine
        self._last_look_at: float | None = None

    def engine_started(self, now: float) -> None:
        """Begin to expect reports."""
        self._last_report_at = now

    def engine_gone(self) -> None:
        """Expect nothing."""
        self._last_report_at = None

    def reported(self, now: float) -> None:
        """Take note of a step or a pong."""
        if self._last_report_at is not None:
            self._last_report_at = now

    def look(self, now: float) -> None:
        """Call before each check, every ``look_every_s``; notices when this process did not run."""
        was_stopped = self._last_look_at is not None and (
            now - self._last_look_at > self._longest_look_s
        )
        self._last_look_at = now
        if was_stopped and self._last_report_at is not None:
            self._last_report_at = now

    def is_alive(self, now: float) -> bool:
        """Whether an engine runs and its last sign of life is recent."""
        return self._last_report_at is not None and now - self._last_report_at <= self._hang_limit_s

    def is_hung(self, now: float) -> bool:
        """Whether an engine runs and has been silent for too long."""
        return self._last_report_at is not None and not self.is_alive(now)
