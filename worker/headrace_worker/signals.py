"""SIGTERM and SIGINT: the first asks for an orderly end, the second ends the process at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Used as a context inside the event loop; handlers are gone afterwards."""

    def __init__(self) -> None:
        self._stopped = asyncio.Event()
        self._on_first: Callable[[], None] = lambda: None
        self._on_second: Callable[[], None] = lambda: None

    def __enter__(self) -> StopSignals:
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._take, number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    @property
    def is_stopped(self) -> bool:
        """Whether the first has come."""
        return self._stopped.is_set()

    def on_first(self, do: Callable[[], None]) -> None:
        """Say what begins the orderly end; done at once when the signal has come already."""
        self._on_first = do
        if self.is_stopped:
            do()

    def on_second(self, do: Callable[[], None]) -> None:
        """Say what must still happen before the process ends at once."""
        self._on_second = do

    async def wait_for(self, work: asyncio.Future[Any]) -> bool:
        """Return whether the work is done; when the signal comes first, cancel it.

        Raises what the work raises.
        """
        stopped = asyncio.ensure_future(self._stopped.wait())
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)  # retrieved, or asyncio complains
            return False
        work.result()
        return True

    def _take(self, number: int) -> None:
        if self.is_stopped:
            self._on_second()
            os._exit(128 + number)
        self._stopped.set()
        self._on_first()
