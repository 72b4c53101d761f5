"""Progress of a batch on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from headrace.cli.batch_run import BatchCounts
from headrace.cli.render import err_console, say

REFRESH_S = 0.2
LINE_EVERY_S = 10.0
RATE_WINDOW_S = 30.0  # over which rich averages for the remaining time


@asynccontextmanager
async def shown_progress(counts: BatchCounts, total: int | None) -> AsyncIterator[None]:
    """Show counts as they change while the block lasts; ``total`` None: nobody knows yet."""
    console = err_console()
    show = _show_bar(counts, total) if console.is_terminal else _show_lines(counts, total)
    task = asyncio.ensure_future(show)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


class Rate:
    """Output tokens a second since the run began."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def of(self, counts: BatchCounts) -> str:
        """Return the mean so far, for people."""
        elapsed_s = max(time.monotonic() - self._started_s, 1e-6)
        return f"{counts.num_output_tokens / elapsed_s:.0f} tokens/s"


async def _show_bar(counts: BatchCounts, total: int | None) -> None:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[failed]}", style="red"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    rate = Rate()
    with Progress(
        *columns, console=err_console(), speed_estimate_period=RATE_WINDOW_S, transient=False
    ) as bar:
        task = bar.add_task("", total=total, completed=counts.num_skipped, rate="", failed="")
        try:
            while True:
                _update(bar, task, counts, rate)
                await asyncio.sleep(REFRESH_S)
        finally:
            _update(bar, task, counts, rate)


def _update(bar: Progress, task: TaskID, counts: BatchCounts, rate: Rate) -> None:
    failed = f"{counts.num_failed} failed" if counts.num_failed else ""
    bar.update(task, completed=counts.num_done, rate=rate.of(counts), failed=failed)


async def _show_lines(counts: BatchCounts, total: int | None) -> None:
    rate = Rate()
    while True:
        await asyncio.sleep(LINE_EVERY_S)
        of_total = "" if total is None else f" of {total}"
        say(
            f"{counts.num_done}{of_total} done, {counts.num_failed} failed, "
            f"{counts.num_in_flight} in flight, {rate.of(counts)}"
        )
