"""Work on a thread that nobody has to wait for."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace_worker.threads import run_abandonable
from support.waiting import PATIENCE_S


async def test_it_returns_what_the_work_returns() -> None:
    """The work runs on another thread, and its result comes back."""
    assert await run_abandonable(threading.get_ident) != threading.get_ident()


async def test_it_raises_what_the_work_raises() -> None:
    """A failure on the thread is a failure of whoever waits."""
    with pytest.raises(ZeroDivisionError):
        await run_abandonable(lambda: 1 / 0)


async def test_work_that_is_given_up_holds_nobody_up() -> None:
    """Whoever waits can be cancelled at once; the thread is a daemon and may go on."""
    started, may_end = threading.Event(), threading.Event()

    def work() -> threading.Thread:
        started.set()
        may_end.wait(PATIENCE_S)
        return threading.current_thread()

    waiting = asyncio.create_task(run_abandonable(work))
    await asyncio.to_thread(started.wait, PATIENCE_S)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    (thread,) = (t for t in threading.enumerate() if t.name == "abandonable")
    assert thread.daemon
    may_end.set()
    thread.join(PATIENCE_S)
