"""A thread that the process does not wait for when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


async def run_abandonable(work: Callable[[], T]) -> T:
    """Do blocking work that may be given up, and return what it returns or raise what it raises.

    asyncio.to_thread would hold up the end of the process until the work is done, which may be
    never: a download from a server that says nothing.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # the thread's end: it is raised where it is awaited
            outcome.set_exception(error)

    outcome.set_running_or_notify_cancel()
    Thread(target=run, name="abandonable", daemon=True).start()
    return await asyncio.wrap_future(outcome)
