"""The form of an answer: which forms there are, their one spelling, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from headrace.checks import MAX_JSON_DEPTH, MAX_SHOWN
from headrace.errors import InvalidRequest
from headrace.response_format import (
    MAX_CHOICES,
    MAX_RESPONSE_FORMAT_BYTES,
    normal_response_format,
)

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"minimum": 0.5}}}


def json_schema(**content: Any) -> dict[str, Any]:
    """Return a response format of a schema, as the OpenAI API spells it."""
    return {"type": "json_schema", "json_schema": content}


@pytest.mark.parametrize(
    ("form", "normal"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "json_object"}),
        (json_schema(schema=SCHEMA), json_schema(schema=SCHEMA)),
        (json_schema(name="n", description="d", schema={}, strict=True), json_schema(schema={})),
        (json_schema(name=None, schema={}, strict=None), json_schema(schema={})),
        ({"regex": "a+", "type": "regex"}, {"type": "regex", "regex": "a+"}),
        (
            {"type": "choice", "choice": ("yes", "no", "yes")},
            {"type": "choice", "choice": ["yes", "no"]},
        ),
    ],
)
def test_every_form_has_one_spelling(form: Any, normal: Any) -> None:
    """What changes no answer is dropped, keys get their order, and normal forms stay."""
    assert json.dumps(normal_response_format(form)) == json.dumps(normal)
    assert normal_response_format(normal) == normal


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ("json", "response_format must be a map, not 'json'"),
        ({}, "response_format.type must be one of"),
        ({"type": "xml"}, "not 'xml'"),
        ({"type": ["text"]}, "not ['text']"),
        ({"type": "text", "regex": "a"}, "of type 'text' does not take 'regex'"),
        ({"type": "json_object", "schema": {}}, "does not take 'schema'"),
        ({"type": "json_object", 5: {}}, "does not take 5"),
        ({"type": "json_schema"}, "json_schema must be a map with a schema, not None"),
        (json_schema(), "json_schema.schema must be a map, not None"),
        (json_schema(schema="{}"), "json_schema.schema must be a map, not '{}'"),
        (json_schema(schema=True), "not True"),
        (json_schema(schema={}, strict=1), "json_schema.strict must be true or false, not 1"),
        (json_schema(schema={}, name=5), "json_schema.name must be text, not 5"),
        (json_schema(schema={}, example={}), "does not take 'example'"),
        (json_schema(schema={"minimum": math.nan}), "must be a finite number, not nan"),
        (json_schema(schema={"enum": [math.inf]}), "must be a finite number, not inf"),
        (json_schema(schema={"const": b"x"}), "holds b'x', which JSON does not know"),
        (json_schema(schema={1: "x"}), "has the key 1, which is not text"),
        (json_schema(schema={"title": "\ud800"}), "cannot be encoded"),
        (json_schema(schema={"title": "x" * MAX_RESPONSE_FORMAT_BYTES}), "bytes, at most"),
        ({"type": "regex"}, "regex must be text, not None"),
        ({"type": "regex", "regex": ""}, "regex must be text, not ''"),
        ({"type": "regex", "regex": 7}, "regex must be text, not 7"),
        ({"type": "regex", "regex": "x" * MAX_RESPONSE_FORMAT_BYTES}, "bytes, at most"),
        ({"type": "choice"}, "choice must be a list, not None"),
        ({"type": "choice", "choice": "yes"}, "choice must be a list, not 'yes'"),
        ({"type": "choice", "choice": []}, "choice is empty"),
        ({"type": "choice", "choice": [""]}, "not ''"),
        ({"type": "choice", "choice": [1]}, "not 1"),
        ({"type": "choice", "choice": ["x"] * (MAX_CHOICES + 1)}, "entries, at most"),
    ],
)
def test_what_is_no_form_is_refused_by_name(form: Any, named: str) -> None:
    """A wrong type, key, value or size raises InvalidRequest that names it."""
    with pytest.raises(InvalidRequest) as caught:
        normal_response_format(form)
    assert named in caught.value.message


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH, MAX_JSON_DEPTH + 1, 100_000])
def test_a_schema_has_a_greatest_depth(depth: int) -> None:
    """One level more than the limit is refused, and so is a schema that would exhaust the stack."""
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    if depth <= MAX_JSON_DEPTH:
        assert normal_response_format(json_schema(schema=schema)) is not None
    else:
        with pytest.raises(InvalidRequest, match="nested deeper than"):
            normal_response_format(json_schema(schema=schema))


def test_a_form_is_a_copy() -> None:
    """What its maker changes later changes no request."""
    schema: dict[str, Any] = {"enum": [1]}
    normal = normal_response_format(json_schema(schema=schema))
    schema["enum"].append(2)
    assert normal == json_schema(schema={"enum": [1]})


def test_a_refusal_quotes_no_huge_value() -> None:
    """A message stays short, whatever the value was."""
    with pytest.raises(InvalidRequest) as caught:
        normal_response_format({"type": "x" * 100_000})
    assert len(caught.value.message) < MAX_SHOWN + 200
