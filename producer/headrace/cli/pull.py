"""``headrace pull``: fetch a model by name; the worker package knows which there are."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

Names = Annotated[
    list[str] | None,
    typer.Argument(
        help="Models to fetch; without any, those that are known.", metavar="[MODEL...]"
    ),
]


def pull(names: Names = None) -> None:
    """Fetch a model into ~/.cache/headrace/models, verified; one that is there is kept."""
    command = [sys.executable, "-m", "headrace_worker.catalogue", *(names or [])]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
