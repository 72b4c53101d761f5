"""When the engine gets its requests: as they arrive, or in static batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from benchmarks.workload import Item


class Feed(Protocol):
    """Hands out the places of items, each once, in order."""

    def due(self, now_s: float, num_unfinished: int) -> range:
        """Return the places of the items to add, by the time since the start and who is left."""
        ...

    @property
    def is_exhausted(self) -> bool:
        """Whether everything has been handed out."""
        ...


class ContinuousFeed:
    """Each request goes in when it arrives: the engine decides who runs in the next step."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items
        self._num_given = 0

    def due(self, now_s: float, num_unfinished: int) -> range:
        """Return whoever has arrived since the last call."""
        start = self._num_given
        while not self.is_exhausted and self._items[self._num_given].arrival_s <= now_s:
            self._num_given += 1
        return range(start, self._num_given)

    @property
    def is_exhausted(self) -> bool:
        """Whether all have arrived."""
        return self._num_given == len(self._items)


class StaticFeed:
    """A batch goes in whole, and the next one when the last of its sequences has ended.

    With a batch of one, requests run one after another.
    """

    def __init__(self, items: Sequence[Item], batch_size: int) -> None:
        self._num_items = len(items)
        self._batch_size = batch_size
        self._num_given = 0

    def due(self, now_s: float, num_unfinished: int) -> range:
        """Return the next batch once nobody is left of the one before."""
        start = self._num_given
        if num_unfinished == 0:
            self._num_given = min(start + self._batch_size, self._num_items)
        return range(start, self._num_given)

    @property
    def is_exhausted(self) -> bool:
        """Whether the last batch is in."""
        return self._num_given == self._num_items
