"""The flags that say what form an answer must have, of which a request takes one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.errors import ConfigurationError


def form_from(
    json_schema: Path | None, regex: str | None, choice: Sequence[str] | None
) -> dict[str, Any] | None:
    """Return the response format that the flags ask for; raises ConfigurationError."""
    forms: dict[str, dict[str, Any]] = {}
    if json_schema is not None:
        schema = {"schema": _read_schema(json_schema)}
        forms["--json-schema"] = {"type": "json_schema", "json_schema": schema}
    if regex is not None:
        forms["--regex"] = {"type": "regex", "regex": regex}
    if choice:
        forms["--choice"] = {"type": "choice", "choice": list(choice)}
    if len(forms) > 1:
        raise ConfigurationError(f"give one of {', '.join(forms)}, not {len(forms)}")
    return next(iter(forms.values()), None)


def _read_schema(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--json-schema {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"--json-schema {path} is not JSON: {error}") from error
