"""How a command runs: its body, what keeps its worker, and signals that end both in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from headrace.cli.exits import ExitCode

CANCEL_AGAIN_S = 3.0  # longer than a client takes to cancel its requests
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(
    body: Coroutine[Any, Any, ExitCode], *, beside: Coroutine[Any, Any, None] | None = None
) -> int:
    """Run a command to its exit code.

    SIGINT, SIGTERM and SIGHUP cancel the body, so that it tidies up, and give 128 + their number;
    a second one ends the process at once. An error of ``beside`` ends the body and is raised.
    """
    return asyncio.run(_run(body, beside))


def heed_cancellation() -> None:
    """Raise the CancelledError that a call of Redis may have swallowed.

    redis-py sends every command through asyncio.wait_for, and that of Python 3.11 drops a
    cancellation that comes in the moment in which the sending completes.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _run(
    body: Coroutine[Any, Any, ExitCode], beside: Coroutine[Any, Any, None] | None
) -> int:
    signalled: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    _catch_signals(signalled)
    main = asyncio.ensure_future(body)
    helpers = [] if beside is None else [asyncio.ensure_future(beside)]
    awaited: list[asyncio.Future[Any]] = [main, signalled, *helpers]
    try:
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if signalled.done():
            return 128 + signalled.result()
        for helper in helpers:
            if helper.done() and not main.done():
                helper.result()
        return await main
    finally:
        # First the body, which still needs the worker to hear of a cancelled request.
        await _cancel(main)
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(main, *helpers, return_exceptions=True)


def _catch_signals(signalled: asyncio.Future[int]) -> None:
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        signalled.set_result(number)
        for other in SIGNALS:
            loop.remove_signal_handler(other)  # the next one is not caught

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup asks for
            loop.add_signal_handler(number, stop, number)


async def _cancel(task: asyncio.Task[ExitCode]) -> None:
    """Cancel until it is done; see heed_cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)
