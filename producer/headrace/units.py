"""Sizes and durations as people write them: ``24MiB``, ``15s``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from headrace.errors import ConfigurationError

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)

_SECONDS: Mapping[str, float] = {
    "us": 1e-6,
    "ms": 1e-3,
    "": 1.0,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_BYTES: Mapping[str, float] = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
}


def parse_duration(text: str) -> float:
    """Return seconds: ``15s``, ``500ms``, ``2m``, ``1.5h``, ``7d``; a bare number is seconds.

    Raises ConfigurationError that names the text.
    """
    return _parse(text, _SECONDS, "a duration such as 500ms, 15s, 2m, 1.5h or 7d")


def parse_bytes(text: str) -> int:
    """Return bytes: ``24MiB`` (binary), ``24MB`` (decimal), ``512``; upper or lower case.

    Raises ConfigurationError that names the text.
    """
    return round(_parse(text, _BYTES, "a size such as 512, 24MiB or 1.5GB"))


def format_duration(seconds: float) -> str:
    """Return a short text that parse_duration reads: ``500ms``, ``15s``, ``2.5m``."""
    for unit in ("d", "h", "m", "s", "ms"):
        if seconds >= _SECONDS[unit]:
            return f"{_three_digits(seconds / _SECONDS[unit])}{unit}"
    return f"{_three_digits(seconds / 1e-6)}us" if seconds else "0s"


def format_bytes(num_bytes: int) -> str:
    """Return a short text that parse_bytes reads: ``512B``, ``24MiB``, ``1.5GiB``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes >= _BYTES[unit.lower()]:
            return f"{_three_digits(num_bytes / _BYTES[unit.lower()])}{unit}"
    return f"{num_bytes}B"


def _parse(text: str, units: Mapping[str, float], wanted: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise ConfigurationError(f"{text!r} is not {wanted}")
    return float(match[1]) * units[match[2].lower()]


def _three_digits(value: float) -> str:
    """Three significant digits where that means decimals, without trailing zeros."""
    text = f"{value:.{max(0, 3 - len(str(int(value))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
