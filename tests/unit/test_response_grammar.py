"""Response formats become grammars that hold to the letter, or a "no" with the library's reason."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from headrace.errors import InvalidRequest
from headrace_worker.serving.response_format import MAX_REASON, make_grammar

JSON_OBJECT = {"type": "json_object"}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

LARGE_SCHEMA = {
    "type": "object",
    "properties": {f"p{n}": {"type": "string", "maxLength": 100} for n in range(300)},
}


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _regex(regex: str) -> dict[str, Any]:
    return {"type": "regex", "regex": regex}


def _takes(form: dict[str, Any], text: str) -> bool:
    """Say whether a text is a complete answer of this form."""
    matcher = LLMatcher(LLTokenizer("byte"), make_grammar(form), log_level=0)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and (
        matcher.is_accepting()
    )


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (JSON_OBJECT, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "7", '{"a": 1', "{} x"]),
        (_schema(PERSON), ['{"name": "Ada", "age": 36}'], ['{"name": "Ada"}', '{"age": 3}', "{}"]),
        (_schema({"enum": ["x", 7]}), ['"x"', "7"], ["x", "8"]),
        (_regex("[ab]+/x"), ["a/x", "abba/x"], ["/x", "a/", "a/xx"]),
        (
            {"type": "choice", "choice": ["yes", "yes/no", '"\\\n🌶']},
            ["yes", "yes/no", '"\\\n🌶'],
            ["no"],
        ),
    ],
)
def test_a_form_takes_what_has_it_and_nothing_else(
    form: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    """Objects, schemas, expressions and choices are held to the last character."""
    assert [text for text in good if not _takes(form, text)] == []
    assert [text for text in bad if _takes(form, text)] == []


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ('{"a":1,"b":[1,2]}', True),
        ('{"a": 1, "b": [1, 2]}', True),
        ('{ "a" : 1 }', True),
        ('{"a":  1}', False),
        ('{"a":\n1}', False),
        (' {"a": 1}', False),
        ('{"a": 1} ', False),
    ],
)
def test_json_has_at_most_one_space_between_its_parts(text: str, is_taken: bool) -> None:
    """A model cannot lose itself in white space, and writes on one line."""
    assert _takes(JSON_OBJECT, text) is is_taken


def test_properties_come_in_the_order_of_the_schema() -> None:
    """What a schema asks for first, such as a reason, is written first."""
    properties = {"why": {"type": "string"}, "answer": {"type": "boolean"}}
    form = _schema({"type": "object", "properties": properties, "required": ["why", "answer"]})
    assert _takes(form, '{"why": "so", "answer": true}')
    assert not _takes(form, '{"answer": true, "why": "so"}')


@pytest.mark.parametrize(
    ("form", "named"),
    [
        (_schema({"type": "nope"}), "nope"),
        (_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (_schema({"type": "object", "properties": {"a": {"not": {}}}}), "not"),
        (_schema({"if": {}, "then": {}}), "if"),
        (_schema({"oneOf": [{"type": "string"}, {"minLength": 3}]}), "oneOf"),
        (_schema({"$ref": "http://example.com/s"}), "http://example.com/s"),
        (_schema({"type": "string", "format": "nope"}), "nope"),
        (_schema({"type": "string", "pattern": "("}), "unclosed group"),
        (_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (_schema({"enum": []}), "Unsatisfiable"),
        (_schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "no text fits it"),
        (_regex("("), "unclosed group"),
        (_regex(r"[^\s\S]"), "no text fits it"),
        (_regex("(?=x)a"), "look-around"),
        (_regex("[a&&b]"), "cannot be held to"),
        (_regex("a\\"), "inside an escape"),
        (_regex("\\"), "inside an escape"),
        ({"type": "xml"}, "xml"),
    ],
)
def test_a_form_that_cannot_be_held_to_is_refused_by_name(form: dict[str, Any], named: str) -> None:
    """B49: what is invalid, unsatisfiable or not supported is that request's error, in words."""
    with pytest.raises(InvalidRequest, match="response_format") as caught:
        make_grammar(form)
    assert named in caught.value.message
    assert len(caught.value.message) < 2 * MAX_REASON
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        (r"\d{4}-\d{2}", ["2026-11"], ["🯸🯸🯸🯸-🯸🯸", "٢٠٢٦-١١"]),
        (r"\D", ["٣", "x"], ["3"]),
        (r"\w+", ["a_Z9"], ["é", "٣", "客"]),
        (r"\W", ["é", "-"], ["a", "_"]),
        (r"a\sb", ["a b", "a\tb"], ["a\u00a0b", "a\u2003b"]),
        (r"\S", ["x", "\u00a0"], [" ", "\n"]),
        (r"[\d.]+", ["1.5"], ["١.٥"]),
        (r"[^\d]", ["x", "٣"], ["3"]),
        (r"[^\W\d]+", ["ab_"], ["a1", "é"]),
        (r"[+-\d]+", ["+-7"], [".", "/"]),
        (r"[-\d]+", ["-7"], ["\\"]),
        (r"[\w--\d]+", ["ab"], ["a1"]),
        (r"[\s\S]+", ["x é\n"], []),
        (r"\\d", ["\\d"], ["\\3", "3"]),
        (r"\\\d", ["\\3"], ["\\d"]),
    ],
)
def test_classes_by_letter_are_ascii(regex: str, good: list[str], bad: list[str]) -> None:
    """A date of four digits is made of 0 to 9, inside and outside brackets."""
    assert [text for text in good if not _takes(_regex(regex), text)] == []
    assert [text for text in bad if _takes(_regex(regex), text)] == []


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [(r"^\d{2}$", "42", "٤٢"), (r"^\w$", "a", "é"), (r"^[\d-]+$", "4-2", "٤-٢")],
)
def test_classes_in_the_pattern_of_a_schema_are_ascii(pattern: str, good: str, bad: str) -> None:
    """What holds for an expression of its own holds for one in a JSON schema."""
    form = _schema({"type": "string", "pattern": pattern})
    assert (_takes(form, f'"{good}"'), _takes(form, f'"{bad}"')) == (True, False)


def test_an_escaped_backslash_at_the_end_is_a_backslash() -> None:
    """Only an escape that is cut short is refused."""
    assert _takes(_regex("a\\\\"), "a\\")


def test_a_schema_cannot_loosen_its_own_rules() -> None:
    """The library's options are not the client's to set, least of all "ignore what is unknown"."""
    schema = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(InvalidRequest, match="must not set 'x-guidance'"):
        make_grammar(_schema(schema))


@pytest.mark.parametrize("regex", ["(a{1000}){1000}", "(a?){1000}a{1000}"])
def test_an_expression_that_explodes_is_refused_in_time(regex: str) -> None:
    """Its states would fill the memory, and its first mask takes seconds: it is seen soon."""
    before_s = time.thread_time()
    make_grammar(_schema(LARGE_SCHEMA))
    between_s = time.thread_time()
    with pytest.raises(InvalidRequest, match="too many"):
        make_grammar(_regex(regex))
    assert time.thread_time() - between_s < 50 * (between_s - before_s)


def test_large_forms_of_real_use_are_taken() -> None:
    """A thousand choices, and three hundred properties, are within the bounds."""
    choices = [f"choice number {n}" for n in range(1000)]
    assert _takes({"type": "choice", "choice": choices}, "choice number 999")
    assert _takes(_schema(LARGE_SCHEMA), '{"p299": "x"}')


def test_the_check_brings_in_neither_torch_nor_numpy() -> None:
    """The transport process stays as small as it was."""
    script = (
        "import sys\n"
        "from headrace_worker.serving.response_format import make_grammar\n"
        "assert 'llguidance' not in sys.modules, 'before it is needed'\n"
        "make_grammar({'type': 'json_object'})\n"
        "print(sorted({'llguidance', 'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["['llguidance']"]


def test_a_grammar_is_the_text_that_the_engine_compiles() -> None:
    """It is JSON of the library's own form, equal for equal formats."""
    grammar = make_grammar(_schema(PERSON))
    assert json.loads(grammar)["grammars"][0]["json_schema"]["required"] == ["name", "age"]
    assert make_grammar(json.loads(json.dumps(_schema(PERSON)))) == grammar
