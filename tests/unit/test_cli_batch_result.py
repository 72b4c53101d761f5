"""Result lines: the OpenAI shape, strict JSON, and a status for every code."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from headrace.cli.batch_file import BatchRequest, read_lines
from headrace.cli.batch_id import batch_id, request_id
from headrace.cli.batch_result import (
    HTTP_STATUS,
    answer_line,
    encode_line,
    error_line,
)
from headrace.errors import ErrorCode
from headrace.keys import check_request_id
from headrace.types import Completion, FinishReason, TokenLogprob, Usage

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def asked(url: str = "/v1/completions", custom_id: str = "q", **body: Any) -> BatchRequest:
    """A request as it is read from a line."""
    entry = {"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"prompt": "Hi"}}
    [item] = read_lines(io.BytesIO(json.dumps(entry).encode()))
    assert isinstance(item, BatchRequest)
    return item


def completion(text: str = "Hello", **changes: Any) -> Completion:
    """An answer, with some fields changed."""
    values: dict[str, Any] = {
        "request_id": "r",
        "text": text,
        "token_ids": (5, 6),
        "finish_reason": FinishReason.STOP,
        "usage": Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
    }
    return Completion(**(values | changes))


def answer(request: BatchRequest, result: Completion) -> dict[str, Any]:
    """The result line of an answer, checked to survive its encoding."""
    line = answer_line("l", request, result, model="m", created_s=1)
    decoded = json.loads(encode_line(line))
    assert decoded == line
    return line


def test_a_completion_has_the_shape_of_the_completions_api() -> None:
    """Text, finish reason and counts stand where OpenAI's readers look."""
    line = answer(asked(), completion())
    assert (line["custom_id"], line["error"]) == ("q", None)
    assert (line["response"]["status_code"], line["response"]["request_id"]) == (200, "r")
    body = line["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "text": "Hello",
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert body["usage"]["total_tokens"] == 5


def test_a_chat_answer_has_the_shape_of_the_chat_api() -> None:
    """The text is the content of an assistant's message."""
    body = answer(asked("/v1/chat/completions", **CHAT), completion())["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["choices"][0]["message"]["role"] == "assistant"


def test_all_n_answers_are_listed_and_the_prompt_is_counted_once() -> None:
    """Usage adds up the answers, not the prompt that they share."""
    both = (completion("one"), completion("two"))
    body = answer(asked(), completion("one", choices=both))["response"]["body"]
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "one"), (1, "two")]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 4


def test_logprobs_name_tokens_by_id() -> None:
    """Both shapes of logprobs carry ids and finite numbers."""
    logprobs = (TokenLogprob(5, -0.5, ((5, -0.5), (9, -1.5))),)
    chat = answer(asked("/v1/chat/completions", **CHAT), completion(logprobs=logprobs))
    [content] = chat["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert (content["token"], content["logprob"]) == ("token_id:5", -0.5)
    assert [top["token"] for top in content["top_logprobs"]] == ["token_id:5", "token_id:9"]
    plain = answer(asked(), completion(logprobs=logprobs))
    shape = plain["response"]["body"]["choices"][0]["logprobs"]
    assert shape["top_logprobs"] == [{"token_id:5": -0.5, "token_id:9": -1.5}]


def test_an_error_is_found_by_either_habit_of_reading() -> None:
    """Readers of ``error`` and readers of the status code both see the failure."""
    line = error_line("l", "q", "context_length_exceeded", "too long", "r")
    assert line["error"] == {"code": "context_length_exceeded", "message": "too long"}
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"]["error"]["message"] == "too long"


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_error_code_has_a_status(code: ErrorCode) -> None:
    """No code of the wire is without an HTTP status."""
    assert 400 <= HTTP_STATUS[code] <= 599
    line = error_line("l", "q", code.value, "m", "r")
    assert line["response"]["status_code"] == HTTP_STATUS[code]


@pytest.mark.parametrize(
    "text", ["a\u2028b", "a\u2029b", "a\u0085b", "a\nb", "a\rb", "\ud800", "ü"]
)
def test_a_result_is_one_line_to_every_reader(text: str) -> None:
    """No character of an answer makes a second line, and every answer is read back as it was."""
    raw = encode_line({"text": text})
    assert len(raw.decode().splitlines()) == 1
    assert json.loads(raw) == {"text": text}


def test_not_a_number_never_reaches_the_file() -> None:
    """What JSON cannot hold is an error, not an invalid line."""
    with pytest.raises(ValueError, match="JSON"):
        encode_line({"x": float("nan")})


def test_a_request_id_is_the_same_in_every_run(tmp_path: Any) -> None:
    """The same line of the same files attaches to what an earlier run left in Redis."""
    batch = batch_id(tmp_path / "in", tmp_path / "out")
    assert batch == batch_id(tmp_path / "x" / ".." / "in", tmp_path / "out")
    assert request_id(batch, asked(), 1) == request_id(batch, asked(), 1)


def test_a_request_id_tells_files_lines_texts_and_tries_apart(tmp_path: Any) -> None:
    """Another output file, custom_id, text, option or try is other work."""
    batch = batch_id(tmp_path / "in", tmp_path / "out")
    ids = {
        request_id(batch, asked(), 1),
        request_id(batch, asked(), 2),
        request_id(batch_id(tmp_path / "in", tmp_path / "out2"), asked(), 1),
        request_id(batch, asked(custom_id="p"), 1),
        request_id(batch, asked(prompt="Ho"), 1),
        request_id(batch, asked(prompt="Hi", temperature=0), 1),
    }
    assert len(ids) == 6


@pytest.mark.parametrize("custom_id", ["plain-1", "with space", "ü" * 500, "a/b:c", "x" * 1000])
def test_any_custom_id_makes_a_valid_request_id(custom_id: str) -> None:
    """Ids of any length and alphabet fit the queue, also with the index of an answer behind."""
    made = request_id(batch_id(None, None), asked(custom_id=custom_id), 1)
    assert check_request_id(f"{made}/127")
