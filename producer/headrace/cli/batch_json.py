"""One batch line as JSON: what it holds, or what is wrong with it and whose line it is.

A line that cannot be used is still answered, and its asker looks for the answer by ``custom_id``.
So the id is read even where the rest cannot be.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 200  # of lists and objects in one another; nothing that we take is half as deep

# An id that is the first key of its line is the line's, however the line goes on.
_FIRST_ID = re.compile(rb'\s*\{\s*"custom_id"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")')


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """What was read of a line."""

    entry: dict[str, Any]  # where there is a fault, perhaps no more than its custom_id
    fault: str | None  # why nothing can be done with it; None: nothing is wrong so far


@dataclass(slots=True)
class _Marks:
    """What Python reads and JSON does not know, collected while it is read."""

    constants: list[str] = field(default_factory=list)  # NaN, Infinity, -Infinity
    repeated: list[str] = field(default_factory=list)  # keys that an object has twice

    def constant(self, name: str) -> float:
        self.constants.append(name)
        return float(name)

    def pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entry = dict(pairs)
        if len(entry) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            self.repeated += [name for name, count in counts.items() if count > 1]
        return entry


def parse_line(line: bytes) -> ParsedLine:
    """Read one line; nothing is raised, whatever the bytes."""
    marks = _Marks()
    try:
        entry = json.loads(
            line.decode(), parse_constant=marks.constant, object_pairs_hook=marks.pairs
        )
    except RecursionError:
        return ParsedLine(_first_id(line), "nested too deeply")
    except ValueError as error:
        return ParsedLine(_first_id(line), f"not JSON: {error}")
    if not isinstance(entry, dict):
        return ParsedLine({}, f"expected an object, got {type(entry).__name__}")
    return ParsedLine(entry, _find_fault(entry, marks))


def _find_fault(entry: dict[str, Any], marks: _Marks) -> str | None:
    if _is_deeper(entry, MAX_DEPTH):
        return f"nested too deeply: more than {MAX_DEPTH} lists and objects in one another"
    if marks.constants:
        place = next(_places_of_constants("", entry), "a value")
        return f"{place} is {marks.constants[0]}, and {marks.constants[0]} is not JSON"
    if marks.repeated:
        return f"the key {marks.repeated[0]!r} is there twice"
    return None


def _is_deeper(value: Any, depth: int) -> bool:
    """Go down level by level, since a call for each level is what deep nesting breaks."""
    level = [value]
    for _ in range(depth):
        level = [item for outer in level for item in _items(outer)]
        if not level:
            return False
    return any(isinstance(value, dict | list) for value in level)


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _places_of_constants(place: str, value: Any) -> Iterator[str]:
    """Yield where NaN and the infinities stand, as ``body.temperature`` or ``body.stop[0]``."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _places_of_constants(f"{place}.{name}" if place else name, item)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _places_of_constants(f"{place}[{number}]", item)
    elif isinstance(value, float) and not math.isfinite(value):
        yield place


def _first_id(line: bytes) -> dict[str, Any]:
    found = _FIRST_ID.match(line)
    if found is None:
        return {}
    try:
        return {"custom_id": json.loads(found[1].decode())}
    except ValueError:
        return {}
