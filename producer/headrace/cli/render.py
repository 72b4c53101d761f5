"""What people see: results on stdout, all else on stderr; colours and tables only on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.types import Completion


def err_console() -> Console:
    """Return the console of everything that is no result."""
    return Console(stderr=True, highlight=False)


def say(message: str) -> None:
    """Tell a person something, on stderr."""
    err_console().print(Text(message), soft_wrap=True)


def fail(message: str) -> None:
    """Say what went wrong, on stderr."""
    err_console().print(Text.assemble(("headrace: ", "bold red"), message), soft_wrap=True)


def write_result(text: str, end: str = "\n") -> None:
    """Write a result to stdout, at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def write_text(text: Text) -> None:
    """Write a result with styles, which a terminal shows and a file does not hold."""
    Console(highlight=False).print(text, soft_wrap=True)


def write_json(value: object) -> None:
    """Write a result as one line of JSON."""
    write_result(json.dumps(value, ensure_ascii=False))


def write_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write rows to stdout: a table on a terminal, tab-separated lines otherwise."""
    texts = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for row in (list(headings), *texts):
            write_result("\t".join(row))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in texts:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)


def summary_of(completion: Completion) -> str:
    """Return the one line under an answer: tokens, TTFT, tokens/s, and why it ended."""
    usage, timings = completion.usage, completion.timings
    parts = [f"{usage.completion_tokens} tokens after {usage.prompt_tokens}"]
    if usage.cached_tokens:
        parts[0] += f" ({usage.cached_tokens} cached)"
    if timings is not None and timings.ttft_s is not None:
        parts.append(f"TTFT {format_seconds(timings.ttft_s)}")
    if timings is not None and timings.tpot_s:
        parts.append(f"{1 / timings.tpot_s:.1f} tokens/s")
    parts.append(f"finish: {completion.finish_reason.value}")
    return " · ".join(parts)


def format_seconds(seconds: float | None) -> str:
    """Return a duration for people: ``84 ms``, ``1.25 s``."""
    if seconds is None:
        return "–"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def format_time(at_s: float | None) -> str | None:
    """Return Unix seconds as a date and time in UTC."""
    if at_s is None:
        return None
    return datetime.fromtimestamp(at_s, UTC).isoformat(sep=" ", timespec="milliseconds")


def plain(value: Any) -> Any:
    """Return a value as JSON holds it: enums by value, tuples as lists."""
    return json.loads(json.dumps(value, default=str))
