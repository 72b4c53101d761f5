"""Batch lines: what is read, what is refused, and that each non-blank line gets one item."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cli.batch_file import (
    MAX_LINE_BYTES,
    BadLine,
    BatchRequest,
    read_lines,
    shorten,
)


def line(custom_id: str = "a", url: str = "/v1/completions", **body: Any) -> bytes:
    """One batch line."""
    body = body or {"prompt": "Hi"}
    entry = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(entry).encode()


def read(*lines: bytes) -> list[BatchRequest | BadLine]:
    """Read lines that are joined by line feeds."""
    return list(read_lines(io.BytesIO(b"\n".join(lines))))


def refusal(raw: bytes) -> BadLine:
    """Read the one line, which is refused."""
    [item] = read(raw)
    assert isinstance(item, BadLine), item
    return item


def test_a_completions_line_becomes_a_request() -> None:
    """A line is read with its number, id, prompt and options."""
    [item] = read(line("q1", prompt="Hi", max_tokens=7, temperature=0, model="m"))
    assert isinstance(item, BatchRequest)
    assert (item.line_number, item.custom_id, item.url) == (1, "q1", "/v1/completions")
    assert (item.body.prompt, item.body.messages, item.body.model) == ("Hi", None, "m")
    assert (item.body.sampling.max_tokens, item.body.sampling.temperature) == (7, 0)


def test_blank_lines_are_skipped_and_counted() -> None:
    """Blank lines give no item, but the numbers of later lines count them."""
    items = read(line("a"), b"", b"  \t\r", line("b"))
    assert [(item.custom_id, item.line_number) for item in items] == [("a", 1), ("b", 4)]


def test_bom_and_crlf_are_accepted() -> None:
    """A byte order mark before any line and CRLF line ends change nothing (B38)."""
    bom = b"\xef\xbb\xbf"
    items = read(bom + line("a") + b"\r", bom + line("b") + b"\r", bom + b"\r")
    assert [type(item) for item in items] == [BatchRequest, BatchRequest]


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (line()[:-5], "not JSON"),
        (b"[1]", "expected an object, got list"),
        (b'"text"', "expected an object, got str"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"custom_id": NaN}', "NaN is not JSON"),
        (b'{"custom_id": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": [{"b": 1}, {"b": NaN}]}', "a[1].b is NaN, and NaN is not JSON"),
        (b'{"custom_id": "a", "custom_id": "b"}', "the key 'custom_id' is there twice"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"{}", "custom_id must be a non-empty string, not None"),
        (b'{"custom_id": ""}', "custom_id must be a non-empty string, not ''"),
        (b'{"custom_id": 7}', "custom_id must be a non-empty string, not 7"),
        (b'{"custom_id": "\\ud800"}', "is not Unicode text"),
        (b'{"custom_id": "a"}', "method must be 'POST', not None"),
        (line()[:-1] + b', "temperature": 0}', "unknown key 'temperature' beside body"),
        (line(url="/v1/x"), "not '/v1/x'"),
        (line(url="/v1/embeddings"), "not '/v1/embeddings'"),
        (b'{"custom_id": "a", "method": "POST", "url": ["/v1/completions"]}', "url must be"),
    ],
)
def test_a_malformed_line_is_refused_by_name(raw: bytes, named: str) -> None:
    """Each kind of broken line gets one refusal that names the line and the value."""
    bad = refusal(raw)
    assert bad.code == "invalid_line"
    assert bad.message.startswith("line 1: ")
    assert named in bad.message


@pytest.mark.parametrize(
    ("url", "body", "named"),
    [
        ("/v1/completions", {"prompt": ""}, "prompt is empty"),
        ("/v1/completions", {"max_tokens": 3}, "prompt must be text"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "a line of its own"),
        ("/v1/completions", {"prompt": [[1], [2]]}, "a line of its own"),
        ("/v1/completions", {"prompt": [1, -2]}, "holds -2"),
        ("/v1/completions", {"prompt": [1, True]}, "holds True"),
        ("/v1/completions", {"prompt": "a", "messages": []}, "belongs to /v1/chat"),
        ("/v1/completions", {"prompt": "a", "logprobs": 99}, "logprobs must be"),
        ("/v1/completions", {"prompt": "a", "echo": 0}, "echo must be true or false, not 0"),
        ("/v1/completions", {"prompt": "a", "best_of": 3}, "best_of = 3 is not supported"),
        ("/v1/completions", {"prompt": "a", "stream": True}, "stream = True is not supported"),
        ("/v1/completions", {"prompt": "a", "tempreature": 1}, "did you mean 'temperature'?"),
        ("/v1/completions", {"prompt": "a", "xyz": 7}, "'xyz' is not supported here, given as 7"),
        ("/v1/completions", {"prompt": "a", "priority": 1}, "run-batch --priority"),
        ("/v1/completions", {"prompt": "a", "request_id": "r"}, "a line has its custom_id"),
        ("/v1/completions", {"prompt": "a", "cache_salt": "s"}, "never share a prefix cache"),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt holds 2 prompts"),
        ("/v1/completions", {"prompt": [["a"]]}, "holds 'a', which is not a token id"),
        ("/v1/completions", {"prompt": [""]}, "prompt is empty"),
        ("/v1/completions", {"prompt": [[]]}, "prompt is empty"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature must be"),
        ("/v1/completions", {"prompt": "a", "temperature": "hot"}, "not 'hot'"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens must be"),
        ("/v1/completions", {"prompt": "a", "model": 4}, "model must be text, not 4"),
        ("/v1/chat/completions", {"messages": []}, "messages is empty"),
        ("/v1/chat/completions", {"messages": "Hi"}, "messages must be a list, not 'Hi'"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "with a role"),
        ("/v1/chat/completions", {"messages": ["x"]}, "with a role"),
        ("/v1/chat/completions", {"prompt": "Hi"}, "'prompt' is not supported"),
    ],
)
def test_a_bad_body_is_refused_by_name(url: str, body: dict[str, Any], named: str) -> None:
    """A value that is wrong, or would silently change the answer, is the error of its line."""
    bad = refusal(line("q", url, **body))
    assert (bad.custom_id, bad.code) == ("q", "invalid_request")
    assert named in bad.message


@pytest.mark.parametrize(
    "extra",
    [
        {"max_tokens": 3, "max_completion_tokens": 4},
        {"logprobs": 5},
        {"top_logprobs": 3},
        {"echo": True},
        {"tools": ["look_up"]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"functions": [{"name": "f"}]},
        {"chat_template_kwargs": {"messages": []}},
        {"response_format": {"type": "grammar"}},
    ],
)
def test_a_chat_body_is_refused_what_it_cannot_have(extra: dict[str, Any]) -> None:
    """Contradictions, and features that do not exist here, are refused."""
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    assert next(iter(extra)) in refusal(line("q", "/v1/chat/completions", **chat, **extra)).message


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [(["The capital of France is"], "The capital of France is"), ([[1, 2, 3]], [1, 2, 3])],
)
def test_a_list_of_one_prompt_is_that_prompt(prompt: object, expected: object) -> None:
    """OpenAI's own examples ask for one prompt in a list."""
    [item] = read(line(prompt=prompt))
    assert isinstance(item, BatchRequest)
    assert item.body.prompt == expected


def test_a_body_that_is_no_object_is_refused() -> None:
    """A body must be an object, and a missing one is named None."""
    entry = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    assert "body must be an object, not None" in refusal(json.dumps(entry).encode()).message


def test_what_changes_no_answer_is_ignored() -> None:
    """Bookkeeping fields, neutral values and nulls are accepted."""
    extra = {
        "user": "u",
        "metadata": {"k": "v"},
        "stream": False,
        "tools": [],
        "response_format": {"type": "text"},
        "temperature": None,
        "seed": None,
    }
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    [item] = read(line("q", "/v1/chat/completions", **chat, **extra))
    assert isinstance(item, BatchRequest)
    assert item.body.sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 5}, 5),
    ],
)
def test_chat_token_limits_mean_what_they_mean_elsewhere(
    options: dict[str, Any], expected: int | None
) -> None:
    """A chat line without a limit runs to the end of the context, as in the OpenAI API."""
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    [item] = read(line("q", "/v1/chat/completions", **chat, **options))
    assert isinstance(item, BatchRequest)
    assert item.body.sampling.max_tokens == expected


def test_a_completions_line_without_a_limit_stops_at_sixteen() -> None:
    """The OpenAI default of completions applies unless the caller sets another."""
    raw = line(prompt="Hi")
    [item] = read_lines(io.BytesIO(raw))
    [capped] = read_lines(io.BytesIO(raw), default_max_tokens=99)
    assert isinstance(item, BatchRequest)
    assert isinstance(capped, BatchRequest)
    assert (item.body.sampling.max_tokens, capped.body.sampling.max_tokens) == (16, 99)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4)],
)
def test_chat_logprobs_are_mapped(options: dict[str, Any], expected: int | None) -> None:
    """The two fields of the chat API become one number."""
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    [item] = read(line("q", "/v1/chat/completions", **chat, **options))
    assert isinstance(item, BatchRequest)
    assert item.body.sampling.logprobs == expected


def test_the_second_use_of_a_custom_id_is_refused() -> None:
    """The first line of an id stands; each later one is an error of its own."""
    first, second, third = read(line("a"), line("a", prompt="other"), line("b"))
    assert isinstance(first, BatchRequest)
    assert isinstance(third, BatchRequest)
    assert isinstance(second, BadLine)
    assert (second.custom_id, second.code) == ("a", "duplicate_custom_id")


def test_a_refused_line_does_not_use_up_its_custom_id_twice() -> None:
    """An id on a line with a bad body is taken, so that each id has one line of its own."""
    first, second = read(line("a", temperature=-1, prompt="x"), line("a"))
    assert isinstance(first, BadLine)
    assert isinstance(second, BadLine)
    assert [first.code, second.code] == ["invalid_request", "duplicate_custom_id"]


def test_a_line_of_a_megabyte_is_read() -> None:
    """A long prompt is the worker's to judge."""
    [item] = read(line(prompt="x" * 1_000_000))
    assert isinstance(item, BatchRequest)


def test_a_line_over_the_limit_is_refused_and_the_next_one_read() -> None:
    """A line too long to be any request is skipped without being held in memory."""
    huge = b"x" * (3 * MAX_LINE_BYTES)
    bad, good = read(huge, line("b"))
    assert isinstance(bad, BadLine)
    assert (bad.line_number, bad.custom_id) == (1, None)
    assert isinstance(good, BatchRequest)
    assert good.line_number == 2


def test_a_message_does_not_quote_a_huge_value() -> None:
    """Error messages stay short, whatever the value was."""
    bad = refusal(line(prompt="a", temperature="x" * 100_000))
    assert len(bad.message) < 500
    assert shorten("short") == "short"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40).filter(lambda raw: b"\n" not in raw),
            st.sampled_from([line("a"), line("b"), b"", b"  ", line("c")[:-3]]),
        ),
        max_size=12,
    )
)
def test_every_line_that_is_not_blank_gets_one_item(lines: list[bytes]) -> None:
    """Whatever the bytes, items and non-blank lines agree in number and order."""
    expected = [
        number
        for number, raw in enumerate(lines, start=1)
        if raw.removeprefix(b"\xef\xbb\xbf").strip()
    ]
    assert [item.line_number for item in read(*lines)] == expected
