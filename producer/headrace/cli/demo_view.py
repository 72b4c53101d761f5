"""Several streams at once: panes on a terminal, lines with the question's number elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from headrace.cli import render

NUM_PANES = 6
PANE_LINES = 5
LINE_LENGTH = 72  # characters of an answer that make a line
REFRESH_PER_S = 10


class StreamView(Protocol):
    """Shows streams; told of their text and their ends."""

    def add(self, at: int, text: str) -> None:
        """Text of stream number ``at`` came."""
        ...

    def end(self, at: int) -> None:
        """Stream number ``at`` has ended."""
        ...


@contextmanager
def open_view(questions: Sequence[str]) -> Iterator[StreamView]:
    """Show streams while the block lasts."""
    if not sys.stdout.isatty():
        yield LineView()
        return
    panes = PaneView(questions)
    with Live(panes, console=Console(highlight=False), refresh_per_second=REFRESH_PER_S):
        yield panes


class LineView:
    """Prints a line of a stream when it is full, so that the streams' lines interleave."""

    def __init__(self) -> None:
        self._pending: dict[int, str] = {}

    def add(self, at: int, text: str) -> None:
        """Print what makes whole lines."""
        pending = self._pending.get(at, "") + text.replace("\n", " ")
        while len(pending) > LINE_LENGTH:
            cut = pending.rfind(" ", 1, LINE_LENGTH) + 1 or LINE_LENGTH
            render.write_result(f"[{at + 1:02}] {pending[:cut].strip()}")
            pending = pending[cut:]
        self._pending[at] = pending

    def end(self, at: int) -> None:
        """Print the rest."""
        if rest := self._pending.pop(at, "").strip():
            render.write_result(f"[{at + 1:02}] {rest}")


class PaneView:
    """Shows a few of the streams that are under way; one that ends makes room for the next."""

    def __init__(self, questions: Sequence[str]) -> None:
        self._questions = questions
        self._texts: dict[int, str] = {}
        self._num_done = 0

    def add(self, at: int, text: str) -> None:
        """Remember the text until the next refresh."""
        self._texts[at] = self._texts.get(at, "") + text

    def end(self, at: int) -> None:
        """Take the stream off the screen."""
        self._texts.pop(at, None)
        self._num_done += 1

    def __rich__(self) -> Columns:
        """Return the panes as they are now."""
        shown = sorted(self._texts)[:NUM_PANES]
        title = f"{self._num_done} of {len(self._questions)} answered, {len(self._texts)} streaming"
        return Columns([self._pane(at) for at in shown], equal=True, expand=True, title=title)

    def _pane(self, at: int) -> Panel:
        width = max(20, Console().width // 2 - 6)
        flat = self._texts[at].replace("\n", " ")
        tail = flat[-width * PANE_LINES :]
        return Panel(
            Text(tail),
            title=f"{at + 1:02} {self._questions[at][: width - 6]}",
            title_align="left",
            height=PANE_LINES + 2,
            width=width + 4,
        )
