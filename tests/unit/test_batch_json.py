"""Batch lines that are not good JSON: said what is wrong, and whose line it is."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from headrace.cli.batch_file import BadLine, read_lines
from headrace.cli.batch_json import MAX_DEPTH, ParsedLine, parse_line


def line(**body: Any) -> bytes:
    """The line of q, with one body."""
    entry = {"custom_id": "q", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(entry).encode()


def nested(depth: int) -> bytes:
    """A line with so many lists in one another, which are never closed or all closed."""
    return b'{"custom_id": "q", "body": ' + b"[" * depth


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (line(prompt="a", temperature=float("nan")), "body.temperature is NaN, and NaN is not"),
        (line(prompt="a", stop=[float("-inf")]), "body.stop[0] is -Infinity"),
        (line(prompt="a")[:-2] + b', "seed": 1, "seed": 2}}', "the key 'seed' is there twice"),
        (line(prompt="a")[:-5], "not JSON"),
        (line(prompt="a") + b"\xff", "not JSON"),
        (nested(100_000), "nested too deeply"),
        (nested(300) + b"]" * 300 + b"}", "nested too deeply"),
    ],
)
def test_a_line_that_cannot_be_used_keeps_its_id(raw: bytes, named: str) -> None:
    """Whoever asked finds the refusal where the answer would be, and the id is used up."""
    bad, second = read_lines(io.BytesIO(raw + b"\n" + line(prompt="a")))
    assert isinstance(bad, BadLine)
    assert (bad.custom_id, bad.code) == ("q", "invalid_line")
    assert named in bad.message
    assert isinstance(second, BadLine)
    assert second.code == "duplicate_custom_id"


@pytest.mark.parametrize(
    ("raw", "custom_id"),
    [
        (b'  { "custom_id" : "a\\"b\\u00e9" , "x": tru', 'a"bé'),
        (b'{"x": tru, "custom_id": "a"}', None),
        (b'{"custom_id": "a', None),
        (b'{"custom_id": "\xff", "x', None),
        (b'{"custom_id": 7, "x', None),
    ],
)
def test_an_id_is_read_only_where_it_is_certain(raw: bytes, custom_id: str | None) -> None:
    """The first key of a broken line is its id; what comes later may stand inside of anything."""
    parsed = parse_line(raw)
    assert parsed.fault is not None
    assert parsed.entry.get("custom_id") == custom_id


def test_a_good_line_is_what_it_holds() -> None:
    """Nothing is added, and a depth that is taken is not a fault."""
    assert parse_line(b'{"a": [1, {"b": 2.5}]}') == ParsedLine({"a": [1, {"b": 2.5}]}, None)
    assert parse_line(nested(MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}").fault is None
    assert parse_line(nested(MAX_DEPTH) + b"]" * MAX_DEPTH + b"}").fault is not None
