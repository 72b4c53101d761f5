"""Writes the figures under build/bench into docs/performance.md and draws the plots.

    python -m benchmarks.report

A table stands between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->``; the text around it is
written by hand. A section that was not measured is left as it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks import compare
from benchmarks.store import FOLDER, load
from benchmarks.tables import HEADINGS, markdown, rows_of

_ROOT = Path(__file__).parents[1]
DOCUMENT = _ROOT / "docs/performance.md"
IMAGES = _ROOT / "docs/images"
_MARKER = re.compile(r"<!-- bench:([\w-]+) -->\n.*?<!-- /bench:\1 -->", re.DOTALL)


def main() -> None:
    """Fill in the document and draw what can be drawn."""
    from benchmarks.plots import draw_all  # needs matplotlib

    draw_all(IMAGES)
    DOCUMENT.write_text(filled(DOCUMENT.read_text("utf-8")), "utf-8")


def filled(text: str, folder: Path = FOLDER, images: Path = IMAGES) -> str:
    """Return the document with every measured section's table, and every plot, in its place."""

    def table(match: re.Match[str]) -> str:
        if match[1] == "plots":
            return f"<!-- bench:plots -->\n{_links(images)}<!-- /bench:plots -->"
        kept = load(match[1], folder)
        if kept is None:
            return match[0]
        return f"<!-- bench:{match[1]} -->\n{_rendered(match[1], kept)}<!-- /bench:{match[1]} -->"

    return _MARKER.sub(table, text)


def _links(images: Path) -> str:
    """Return a line for each plot that there is."""
    files = sorted(images.glob("*.svg"))
    return "".join(f"![{file.stem}](images/{file.name})\n\n" for file in files)


def _rendered(name: str, kept: dict[str, Any]) -> str:
    if name.startswith("peers"):
        table = markdown(compare.HEADINGS, [compare.row(pair) for pair in kept["data"]["pairs"]])
    else:
        table = markdown(HEADINGS, rows_of(name, kept["data"]))
    return f"{table}\n{kept['machine']}, {kept['made_at'][:10]}.\n"


if __name__ == "__main__":
    main()
