"""The form that an answer must have: the shape of the option, not of what it says.

Whether a schema or a regular expression makes sense is for the worker, which has the library that
compiles it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.checks import check_json_size, check_texts, json_copy, shown
from headrace.errors import InvalidRequest

MAX_RESPONSE_FORMAT_BYTES = 64 * 1024  # as JSON
MAX_CHOICES = 1024

_KEYS_OF_TYPE: dict[str, set[str]] = {
    "text": set(),
    "json_object": set(),
    "json_schema": {"json_schema"},
    "regex": {"regex"},
    "choice": {"choice"},
}
# The last three change no answer: a schema always holds to the letter.
_KEYS_OF_SCHEMA = {"schema", "name", "description", "strict"}


def normal_response_format(form: object) -> dict[str, Any] | None:
    """Return the one spelling of a response format, a copy; None for plain text.

    Takes the forms of the OpenAI API, and the types ``regex`` and ``choice``. Raises InvalidRequest
    that names the key or value at fault.
    """
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise InvalidRequest(f"response_format must be a map, not {shown(form)}")
    kind = form.get("type")
    if not isinstance(kind, str) or kind not in _KEYS_OF_TYPE:
        raise InvalidRequest(
            f"response_format.type must be one of {list(_KEYS_OF_TYPE)}, not {shown(kind)}"
        )
    _refuse_unknown(f"response_format of type {kind!r}", form, {"type"} | _KEYS_OF_TYPE[kind])
    if kind == "text":
        return None
    normal = {"type": kind} | {key: _VALUES[key](form.get(key)) for key in _KEYS_OF_TYPE[kind]}
    check_json_size("response_format", normal, MAX_RESPONSE_FORMAT_BYTES)
    return normal


def _schema(value: object) -> dict[str, Any]:
    name = "response_format.json_schema"
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} must be a map with a schema, not {shown(value)}")
    _refuse_unknown(name, value, _KEYS_OF_SCHEMA)
    for key, kind in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(value.get(key), kind | None):
            raise InvalidRequest(f"{name}.{key} must be {_WORDS[kind]}, not {shown(value[key])}")
    schema = value.get("schema")
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{name}.schema must be a map, not {shown(schema)}")
    return {"schema": json_copy(f"{name}.schema", schema)}


def _regex(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"response_format.regex must be text, not {shown(value)}")
    return value


def _choice(value: object) -> list[str]:
    """A choice given twice is one choice."""
    choices = tuple(value) if isinstance(value, list) else value
    check_texts("response_format.choice", choices, MAX_CHOICES, MAX_RESPONSE_FORMAT_BYTES)
    if not choices:
        raise InvalidRequest("response_format.choice is empty: []")
    return list(dict.fromkeys(choices))  # type: ignore[call-overload]


def _refuse_unknown(name: str, given: Mapping[Any, Any], known: set[str]) -> None:
    for key in given:
        if key not in known:
            raise InvalidRequest(f"{name} does not take {shown(key)}")


_VALUES = {"json_schema": _schema, "regex": _regex, "choice": _choice}
_WORDS = {str: "text", bool: "true or false"}
