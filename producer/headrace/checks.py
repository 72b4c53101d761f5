"""Checks of untrusted option values: each returns what is good and names what is not."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from headrace.errors import InvalidRequest

MAX_INT = 2**31 - 1
MAX_JSON_DEPTH = 48
MAX_SHOWN = 200  # characters of a value that a message quotes


def shown(value: object) -> str:
    """Return a value for a message: its repr, cut where it is long."""
    try:
        said = repr(value)
    except (RecursionError, ValueError):  # nested too deep; an integer of thousands of digits
        return f"a value of type {type(value).__name__} that is too large to show"
    return said if len(said) <= MAX_SHOWN else f"{said[:MAX_SHOWN]}…"


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raise InvalidRequest unless the value is a whole number in ``[low, high]``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(
            f"{name} must be a whole number in [{low}, {high}], not {shown(value)}"
        )


def check_number(
    name: str, value: object, low: float, high: float, *, is_low_open: bool = False
) -> None:
    """Raise InvalidRequest unless the value is a finite number in ``[low, high]``.

    With ``is_low_open`` the range is ``(low, high]``.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a finite number, not {shown(value)}")
    if not abs(value) <= sys.float_info.max:  # also true of NaN, and of integers beyond any float
        raise InvalidRequest(f"{name} must be a finite number, not {shown(value)}")
    if not low <= value <= high or (is_low_open and value == low):
        wanted = _range_in_words(low, high, is_low_open)
        raise InvalidRequest(f"{name} must be {wanted}, not {shown(value)}")


def check_boolean(name: str, value: object) -> None:
    """Raise InvalidRequest unless the value is true or false."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, not {shown(value)}")


def check_tuple(name: str, value: object, most: int, wanted: str = "a list") -> None:
    """Raise InvalidRequest unless the value is a tuple of at most ``most`` entries."""
    if not isinstance(value, tuple):
        raise InvalidRequest(f"{name} must be {wanted}, not {shown(value)}")
    if len(value) > most:
        raise InvalidRequest(f"{name} has {len(value)} entries, at most {most} are taken")


def check_texts(name: str, values: object, most: int, longest: int, wanted: str = "a list") -> None:
    """Raise InvalidRequest unless this is a tuple of texts of ``1..longest`` characters."""
    check_tuple(name, values, most, wanted)
    for value in values:  # type: ignore[attr-defined]
        if not isinstance(value, str) or not 1 <= len(value) <= longest:
            raise InvalidRequest(
                f"{name} must hold strings of 1..{longest} characters, not {shown(value)}"
            )


def plain_json(name: str, value: object, max_bytes: int) -> Any:
    """Return a copy of a JSON value; raises InvalidRequest for another, too big or too deep."""
    plain = json_copy(name, value)
    check_json_size(name, plain, max_bytes)
    return plain


def check_json_size(name: str, plain: object, max_bytes: int) -> None:
    """Raise InvalidRequest unless the plain value has at most so many bytes as JSON."""
    try:
        size = len(json.dumps(plain, ensure_ascii=False).encode())
    except ValueError as error:  # a lone surrogate
        raise InvalidRequest(f"{name} cannot be encoded: {error}") from error
    if size > max_bytes:
        raise InvalidRequest(f"{name} has {size} bytes, at most {max_bytes} are taken")


def json_copy(name: str, value: object, left: int = MAX_JSON_DEPTH) -> Any:
    """Return a copy of a JSON value of at most ``left`` levels; raises InvalidRequest."""
    if isinstance(value, float):
        check_number(name, value, -sys.float_info.max, sys.float_info.max)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if left == 0:
        raise InvalidRequest(f"{name} is nested deeper than {MAX_JSON_DEPTH}")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidRequest(f"{name} has the key {shown(key)}, which is not text")
        return {key: json_copy(name, item, left - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_copy(name, item, left - 1) for item in value]
    raise InvalidRequest(f"{name} holds {shown(value)}, which JSON does not know")


def _range_in_words(low: float, high: float, is_low_open: bool) -> str:
    if high == float("inf"):
        return f"at least {low:g}"
    return f"above {low:g} and at most {high:g}" if is_low_open else f"in [{low:g}, {high:g}]"
