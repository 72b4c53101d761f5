"""Waiting for a condition with a deadline, instead of sleeping for a guessed time.

A deadline that is kept costs nothing, so it is long enough for a machine that is busy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.005
PATIENCE_S = 60.0  # nothing takes so long, however busy the machine is: this stands for a hang


def eventually(condition: Callable[[], T], *, timeout_s: float = PATIENCE_S) -> T:
    """Return the condition's first true value; raises AssertionError when the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        is_late = time.monotonic() > deadline  # asked before: whoever was stopped looks once more
        if value := condition():
            return value
        if is_late:
            raise AssertionError(f"not within {timeout_s:g} s: {condition}")
        time.sleep(POLL_S)


async def eventually_async(
    condition: Callable[[], Awaitable[T]], *, timeout_s: float = PATIENCE_S
) -> T:
    """Do what ``eventually`` does, for a condition that has to be awaited."""
    deadline = time.monotonic() + timeout_s
    while True:
        is_late = time.monotonic() > deadline
        if value := await condition():
            return value
        if is_late:
            raise AssertionError(f"not within {timeout_s:g} s: {condition}")
        await asyncio.sleep(POLL_S)
