"""Where figures are kept: a JSON file a section, with the machine that they were made on."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import Machine
from benchmarks.options import Options

FOLDER = Path(__file__).parents[1] / "build/bench"


def save(name: str, options: Options, data: dict[str, Any], folder: Path = FOLDER) -> None:
    """Keep a section's figures, in the place of older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv[1:]),
        "machine": str(Machine.here()),
        "options": asdict(options),
    }
    text = json.dumps({**about, "data": data}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n", "utf-8")


def load(name: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """Return what ``save`` kept, the section under ``data``; None where nothing was."""
    file = folder / f"{name}.json"
    return dict(json.loads(file.read_text("utf-8"))) if file.is_file() else None
