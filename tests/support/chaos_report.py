"""The report of a chaos run: a table on the terminal, chaos-report.json, a table in Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from support.chaos_fault import Fault
from support.chaos_result import Result

Row = tuple[Fault, Result]

JSON_NAME = "chaos-report.json"
MARKDOWN_NAME = "chaos-report.md"


def show(rows: Sequence[Row], console: Console) -> None:
    """Print a row for each fault, and every problem in words."""
    table = Table("fault", "verdict", "figures", "server", title="Nothing lost, nothing twice")
    for heading in ("seed", "took"):
        table.add_column(heading, justify="right")
    for fault, result in rows:
        color = {"passed": "green", "FAILED": "red"}.get(result.verdict, "yellow")
        table.add_row(
            fault.name,
            f"[{color}]{result.verdict}[/]",
            _figures(result),
            result.server,
            str(result.seed),
            f"{result.took_s:.0f} s",
        )
    console.print(table)
    for fault, result in rows:
        for problem in result.document()["problems"]:
            console.print(f"{fault.name}: {problem}", markup=False, highlight=False, soft_wrap=True)


def write(rows: Sequence[Row], folder: Path, *, scale: float) -> None:
    """Write both files; an older report of the same faults is replaced."""
    when = datetime.now().astimezone().isoformat(timespec="seconds")
    document = {
        "date": when,
        "scale": scale,
        "faults": [
            {
                "injected_by": fault.injected_by,
                "passes_when": fault.passes_when,
                **result.document(),
            }
            for fault, result in rows
        ],
    }
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    (folder / JSON_NAME).write_text(text, encoding="utf-8")
    (folder / MARKDOWN_NAME).write_text(markdown(rows), encoding="utf-8")


def markdown(rows: Sequence[Row]) -> str:
    """Return the table that docs/reliability.md shows."""
    lines = [
        "| fault | injected by | passes when | verdict | figures | server | seed |",
        "|---|---|---|---|---|---|---|",
    ]
    for fault, result in rows:
        cells = (
            fault.name,
            fault.injected_by,
            fault.passes_when,
            result.verdict,
            _figures(result),
            result.server,
            str(result.seed),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _figures(result: Result) -> str:
    if result.missing:
        return f"this machine has no {result.missing}"
    size = result.size
    return "; ".join([f"{size.requests:,} requests", *map(str, result.figures)])
