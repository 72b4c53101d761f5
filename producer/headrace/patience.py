"""How long a reader waits, without I/O: three timeouts, and the questions asked meanwhile.

A reader never trusts silence. While nothing arrives it asks for the request's status after one
second, then ever more rarely, so that a request that Redis lost is reported and not awaited.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from headrace.assembly import LogAssembly
from headrace.errors import (
    DeadlineExceeded,
    ErrorCode,
    FirstChunkTimeout,
    InvalidRequest,
    RequestError,
    RequestTimeout,
    StreamStalled,
    error_for,
)
from headrace.types import RequestStatus, Timeout

FIRST_PROBE_S = 1.0
LONGEST_PROBE_S = 15.0

FIRST_DELAY_S = 0.02
LONGEST_DELAY_S = 2.0
SHORTEST_SHARE = 0.5  # of a pause


class Patience:
    """The clocks of one reader; every ``now_s`` is a monotonic time in seconds."""

    def __init__(self, timeout: Timeout, request_id: str, now_s: float) -> None:
        self._timeout = timeout
        self._request_id = request_id
        self._called_s = now_s
        self._has_heard = False
        self._is_doubtful = False
        self._silent_since_s = now_s
        self._probe_gap_s = FIRST_PROBE_S
        self._probe_at_s = now_s + FIRST_PROBE_S

    def wait_begins(self, now_s: float) -> None:
        """Count silence from here: the time that a caller spends between chunks is its own."""
        self._silent_since_s = now_s
        self._probe_gap_s = FIRST_PROBE_S
        self._probe_at_s = now_s + FIRST_PROBE_S

    def heard(self, now_s: float) -> None:
        """Note that a chunk came."""
        self._has_heard = True
        self.wait_begins(now_s)

    def doubt(self) -> None:
        """Ask for the status at once: the connection was lost, and maybe more with it."""
        self._is_doubtful = True

    def wait_s(self, now_s: float) -> float:
        """Return how long to wait before one of the clocks wants attention; at least 0."""
        if self._is_doubtful:
            return 0.0
        nearest_s = self._probe_at_s
        for at_s, _, _, _ in self._limits():
            nearest_s = min(nearest_s, at_s)
        return max(0.0, nearest_s - now_s)

    def is_probe_due(self, now_s: float) -> bool:
        """Whether to ask for the status now; if so, the next question comes later."""
        if not self._is_doubtful and now_s < self._probe_at_s:
            return False
        self._is_doubtful = False
        self._probe_at_s = now_s + self._probe_gap_s
        self._probe_gap_s = min(2 * self._probe_gap_s, LONGEST_PROBE_S)
        return True

    def verdict(self, now_s: float) -> RequestTimeout | None:
        """Return the timeout that is over, not raised, or None."""
        for at_s, error, limit_s, awaited in self._limits():
            if at_s <= now_s:
                return error(self._request_id, limit_s, awaited)
        return None

    def refuse_overtime(self, now_s: float) -> None:
        """Raise DeadlineExceeded when the total time is over, however well chunks flow."""
        total_s = self._timeout.total
        if total_s is not None and self._called_s + total_s <= now_s:
            raise DeadlineExceeded(self._request_id, total_s, "the end")

    def _limits(self) -> Iterator[tuple[float, type[RequestTimeout], float, str]]:
        limit = self._timeout
        if limit.total is not None:
            yield self._called_s + limit.total, DeadlineExceeded, limit.total, "the end"
        if not self._has_heard and (first_s := limit.first_chunk) is not None:
            yield self._called_s + first_s, FirstChunkTimeout, first_s, "the first chunk"
        if self._has_heard and (gap_s := limit.between_chunks) is not None:
            yield self._silent_since_s + gap_s, StreamStalled, gap_s, "the next chunk"


def explain_silence(status: RequestStatus | None, log: LogAssembly) -> RequestError | None:
    """Say why a log will stay silent for ever, or None while there is hope.

    To be asked when the log, read once more after the status, had nothing new: what the status
    promises and the log does not hold is gone.
    """
    if status is None:
        return _lost(log, "Redis no longer knows it")
    if not status.state.is_terminal:
        if status.num_tokens <= log.num_tokens:
            return None
        return _lost(log, f"tokens {log.num_tokens} to {status.num_tokens} are gone from its log")
    if status.num_tokens >= log.num_tokens:
        message = f"it is {status.state.value}, and its result is gone"
        return error_for(ErrorCode.RESULT_EXPIRED, message, request_id=log.request_id)
    if log.num_tokens > log.start:
        return _lost(log, f"it ended after {status.num_tokens} of {log.num_tokens} tokens read")
    message = f"after {log.start} lies beyond its {status.num_tokens} tokens"
    return InvalidRequest(message, request_id=log.request_id)


def _lost(log: LogAssembly, message: str) -> RequestError:
    return error_for(ErrorCode.LOST, message, request_id=log.request_id)


def delays_s() -> Iterator[float]:
    """Yield the pauses between tries to reach Redis: at once, then doubling up to a cap.

    No two clients wait equally long, or all would come back at the same moment.
    """
    yield 0.0
    delay_s = FIRST_DELAY_S
    while True:
        yield delay_s * random.uniform(SHORTEST_SHARE, 1.0)
        delay_s = min(2 * delay_s, LONGEST_DELAY_S)
