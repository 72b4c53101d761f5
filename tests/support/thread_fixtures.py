"""Fixtures that hold torch to a number of threads; their folders' conftest files import them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny matrices are slower on many threads than on one."""
    with _threads(1):
        yield


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Work is shared out, also on a machine with one core."""
    with _threads(2):
        yield


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    import torch  # not for tests that need none

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
