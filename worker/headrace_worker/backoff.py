"""How long to wait before the next try: doubling, capped, never the same for two workers."""

from __future__ import annotations

import random


class Backoff:
    """Between ``first_s`` and ``most_s`` seconds; ``reset`` after a success."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def next_delay_s(self) -> float:
        """Return the delay before the next try, and double the one after it."""
        delay_s = self._next_s * random.uniform(0.75, 1.0)
        self._next_s = min(self._most_s, self._next_s * 2)
        return delay_s

    def reset(self) -> None:
        """Begin again with the shortest delay."""
        self._next_s = self._first_s


def redis_backoff() -> Backoff:
    """Return the pauses between tries of a call to Redis."""
    return Backoff(first_s=0.05, most_s=2.0)
