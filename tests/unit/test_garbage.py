"""Objects that stay for good cost the garbage collector nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from headrace_worker.garbage import spare_the_living


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_there_is_never_visited_again() -> None:
    """A large structure is in no generation afterwards."""
    kept = [[number] for number in range(10_000)]
    spare_the_living()
    assert not any(item is kept for item in gc.get_objects())


def test_later_garbage_is_still_found() -> None:
    """A cycle that was made afterwards is collected."""
    spare_the_living()
    cycle: list[object] = []
    cycle.append(cycle)
    del cycle
    assert gc.collect() >= 1
