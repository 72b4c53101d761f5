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


def chat(**body: Any) -> BatchRequest:
    """A request of the chat API."""
    return asked("/v1/chat/completions", **CHAT, **body)


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
    body = answer(chat(), completion())["response"]["body"]
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
    spoken = answer(chat(), completion(logprobs=logprobs))
    [content] = spoken["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert (content["token"], content["logprob"]) == ("token_id:5", -0.5)
    assert [top["token"] for top in content["top_logprobs"]] == ["token_id:5", "token_id:9"]
    plain = answer(asked(), completion(logprobs=logprobs))
    shape = plain["response"]["body"]["choices"][0]["logprobs"]
    assert shape["top_logprobs"] == [{"token_id:5": -0.5, "token_id:9": -1.5}]


PROMPT_SCORES = (None, TokenLogprob(8, -2.0, ((7, -0.25),)))
SCORES = (TokenLogprob(5, -0.5, ((5, -0.5),)),)


def test_an_echoed_prompt_has_its_logprobs_before_those_of_the_answer() -> None:
    """Each list covers the whole text; the first token has no logprob, as in the OpenAI API."""
    request = asked(prompt=[3, 8], echo=True, logprobs=1)
    result = completion(logprobs=SCORES, prompt_logprobs=PROMPT_SCORES)
    [choice] = answer(request, result)["response"]["body"]["choices"]
    assert choice["logprobs"] == {
        "tokens": ["token_id:3", "token_id:8", "token_id:5"],
        "token_logprobs": [None, -2.0, -0.5],
        "top_logprobs": [None, {"token_id:7": -0.25}, {"token_id:5": -0.5}],
    }


def test_the_first_token_of_an_echoed_text_has_no_name() -> None:
    """No tokenizer runs here, so where the prompt was text its first id is not known."""
    request = asked(prompt="Hi", echo=True, logprobs=1)
    result = completion(logprobs=None, prompt_logprobs=PROMPT_SCORES)
    [choice] = answer(request, result)["response"]["body"]["choices"]
    assert choice["logprobs"]["tokens"] == [None, "token_id:8"]


def test_logprobs_of_the_prompt_alone_are_no_logprobs_of_the_text() -> None:
    """Who asks for the one does not get the other, with or without an echo."""
    for request in (asked(prompt="Hi", prompt_logprobs=1, echo=True), asked()):
        result = completion(prompt_logprobs=PROMPT_SCORES)
        [choice] = answer(request, result)["response"]["body"]["choices"]
        assert choice["logprobs"] is None
        assert len(choice["prompt_logprobs"]) == 2


def test_logprobs_of_the_prompt_have_the_shape_of_vllm() -> None:
    """A map from ids for each token; a rank beyond those that were asked for is not known."""
    expected = [
        None,
        {
            "8": {"logprob": -2.0, "rank": None, "decoded_token": None},
            "7": {"logprob": -0.25, "rank": 1, "decoded_token": None},
        },
    ]
    result = completion(prompt_logprobs=PROMPT_SCORES)
    text = answer(asked(), result)["response"]["body"]
    spoken = answer(chat(), result)["response"]["body"]
    assert text["choices"][0]["prompt_logprobs"] == spoken["prompt_logprobs"] == expected
    assert "prompt_logprobs" not in spoken["choices"][0]
    assert "prompt_logprobs" not in answer(asked(), completion())["response"]["body"]["choices"][0]


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
        request_id(batch, chat(), 1),
        request_id(batch, chat(tools=[{"type": "function"}]), 1),
        request_id(batch, chat(chat_template_kwargs={"x": 1}), 1),
        request_id(batch, chat(guided_json={"properties": {"a": {}, "b": {}}}), 1),
        request_id(batch, chat(guided_json={"properties": {"b": {}, "a": {}}}), 1),
    }
    assert len(ids) == 11


@pytest.mark.parametrize("custom_id", ["plain-1", "with space", "ü" * 500, "a/b:c", "x" * 1000])
def test_any_custom_id_makes_a_valid_request_id(custom_id: str) -> None:
    """Ids of any length and alphabet fit the queue, also with the index of an answer behind."""
    made = request_id(batch_id(None, None), asked(custom_id=custom_id), 1)
    assert check_request_id(f"{made}/127")
