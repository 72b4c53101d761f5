"""A response format becomes a grammar, checked before the engine ever sees it.

The library is llguidance; the grammar is the text that its matcher takes. What a schema asks for
and the library cannot hold to is refused, never left out. JSON is written on one line, with at most
one space between its parts: a model cannot lose itself in white space, and may still write
``{"a": 1}`` as it learned to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from headrace.checks import shown
from headrace.errors import InvalidRequest
from headrace_worker.serving.regex import with_ascii_classes

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

# A fifth of a second, for the first grammar only; so the imports stand where they are needed.

MAX_REASON = 300  # characters of the library's message
# Work that the check of one grammar may cost, in the library's own unit: 0.2 s, at worst.
MAX_FUEL = 100_000

_JSON_OPTIONS: JsonCompileOptions = {
    "lenient": False,
    "whitespace_flexible": True,
    "whitespace_pattern": "[ ]?",
}
_OPTIONS_KEY = "x-guidance"  # in a schema, sets options of the library
_NUM_BYTES = 256  # of the library's byte tokenizer, ids beyond are its special tokens
_NOTHING_FITS = "NoExtensionBias"  # what the library says of a grammar without a first byte
_LONE_BACKSLASH = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")


def make_grammar(form: Mapping[str, Any]) -> str:
    """Return the grammar of a response format that the client library has found well-formed.

    Blocks, for a quarter of a second at worst. Raises InvalidRequest that holds the value and the
    library's reason.
    """
    return _make(json.dumps(form))


@lru_cache(maxsize=64)  # of 64 KiB each at most; many requests ask for the same form
def _make(form_json: str) -> str:
    form = json.loads(form_json)
    match form:
        case {"type": "json_object"}:
            grammar, what = _from_schema({"type": "object"}), "json_object"
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            grammar, what = _from_schema(schema), f"json_schema {shown(schema)}"
        case {"type": "regex", "regex": regex}:
            grammar, what = _from_regex(regex), f"regex {shown(regex)}"
        case {"type": "choice", "choice": choices}:
            grammar, what = _from_choices(choices), f"choice {shown(choices)}"
        case _:
            raise InvalidRequest(f"response_format is not known here: {shown(form)}")
    if (reason := _find_fault(grammar)) is not None:
        raise InvalidRequest(f"response_format has a {what} that cannot be held to: {reason}")
    return grammar


def _from_schema(schema: Mapping[str, Any]) -> str:
    from llguidance import LLMatcher

    if _OPTIONS_KEY in schema:
        raise InvalidRequest(f"response_format.json_schema must not set {_OPTIONS_KEY!r}")
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS))


def _from_regex(regex: str) -> str:
    from llguidance import LLMatcher

    if _LONE_BACKSLASH.search(regex):  # the library would read on, into its own syntax
        raise InvalidRequest(f"response_format.regex ends inside an escape: {shown(regex)}")
    return str(LLMatcher.grammar_from_regex(with_ascii_classes(regex)))


def _from_choices(choices: list[str]) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices))))


def _find_fault(grammar: str) -> str | None:
    """Compile it over single bytes, and try one that may come first: None if all is well.

    An expression that explodes shows it behind its first byte, where the work is bounded as before.
    """
    matcher = _compile(grammar)
    if not matcher.is_error():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        first = (mask & -mask).bit_length() - 1
        if 0 <= first < _NUM_BYTES:
            matcher.consume_token(first)
    return _shorten(matcher.get_error()) if matcher.is_error() else None


def _compile(grammar: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    limits = LLParserLimits(
        initial_lexer_fuel=MAX_FUEL, step_lexer_fuel=MAX_FUEL, verbose_errors=False
    )
    return LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits)


def _shorten(message: str) -> str:
    """Return the one line that says why: that of the regex parser, if there is one."""
    if message.startswith(_NOTHING_FITS):
        return "no text fits it"
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "")
    return said.removeprefix("error:").strip()[:MAX_REASON]
