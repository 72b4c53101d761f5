"""Chat templates run over whatever messages a client sends, and fail that client alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace_worker.serving.chat import Chat
from headrace_worker.serving.tokenizer import Tokenizer
from support.tokenizers import (
    BOS_ID,
    EOS_ID,
    byte_level_tokenizer,
    sentence_piece_tokenizer,
)

BYTE_LEVEL = byte_level_tokenizer()
SENTENCE_PIECE = sentence_piece_tokenizer()

USER: dict[str, Any] = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE], ids=["bytes", "pieces"])
def test_a_chat_has_exactly_one_bos(tokenizer: Tokenizer) -> None:
    """B40: the template's BOS is the only one, whatever the tokenizer adds to raw text."""
    chat = Chat([USER, {"role": "assistant", "content": "Yes?"}, USER])
    ids = tokenizer.encode_plain(tokenizer.render_chat(chat))
    assert (ids[0], ids.count(BOS_ID), ids.count(EOS_ID)) == (BOS_ID, 1, 3)


def test_a_chat_ends_where_the_assistant_begins() -> None:
    """The template is asked for the start of an answer."""
    assert BYTE_LEVEL.render_chat(Chat([USER])) == "<s>[user]Hi</s>[assistant]"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("Hi", "Hi"),
        ([], ""),
        ([{"type": "text", "text": "H"}, {"type": "text", "text": "i"}], "Hi"),
    ],
)
def test_content_is_null_text_or_parts(content: object, text: str) -> None:
    """B41: null is no text, and parts are joined, also for templates that add strings."""
    adds = byte_level_tokenizer(chat_template="{{ '>' + messages[0]['content'] }}")
    assert adds.render_chat(Chat([{"role": "user", "content": content}])) == ">" + text


def test_absent_content_is_no_text() -> None:
    """An assistant's turn may have tool calls only."""
    assert BYTE_LEVEL.render_chat(Chat([{"role": "assistant"}])) == "<s>[assistant]</s>[assistant]"


def test_a_template_s_refusal_is_the_answer() -> None:
    """B41: what the template raises reaches the caller in its own words."""
    with pytest.raises(InvalidRequest, match="no system role here"):
        BYTE_LEVEL.render_chat(Chat([{"role": "system", "content": "Be brief."}, USER]))


def test_a_refusal_quotes_no_whole_message() -> None:
    """It travels in the terminal entry, so what a template quotes is cut."""
    quotes = byte_level_tokenizer(chat_template="{{ raise_exception(messages[0].content) }}")
    with pytest.raises(InvalidRequest, match=r"no{400}") as caught:
        quotes.render_chat(Chat([{"role": "user", "content": "n" + "o" * 100_000}]))
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[0]['content'].missing() }}",
        "{{ messages[7]['content'].x }}",
        "{{ 1 // 0 }}",
        "{% if %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_fails_fails_the_request_alone(template: str) -> None:
    """Whatever goes wrong inside a template, unsafe code included, is an invalid request."""
    with pytest.raises(InvalidRequest, match="chat template"):
        byte_level_tokenizer(chat_template=template).render_chat(Chat([USER]))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (7, "7"),
        ({"text": "x"}, "'text'"),
        (["x"], "'x'"),
        ([{"type": "image_url"}], "image_url"),
        ([{"type": "text", "text": 7}], "'text'"),
        ([{}], "{}"),
    ],
)
def test_content_that_is_no_text_is_refused_by_name(content: object, named: str) -> None:
    """The error holds the part that cannot be taken."""
    with pytest.raises(InvalidRequest, match=named):
        BYTE_LEVEL.render_chat(Chat([{"role": "user", "content": content}]))


def test_a_model_without_template_takes_prompts_only() -> None:
    """The error says what to send instead."""
    with pytest.raises(InvalidRequest, match="send a prompt"):
        byte_level_tokenizer(chat_template=None).render_chat(Chat([USER]))


CALL: dict[str, Any] = {"function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
MAPS = "{% for c in messages[0].tool_calls %}{{ c.function.arguments.items() | list }}{% endfor %}"
TEXTS = "{% for c in messages[0].tool_calls %}{{ 'call ' + c.function.arguments }}{% endfor %}"


def _with_call(template: str, **function: Any) -> str:
    call = {**CALL, "function": {**CALL["function"], **function}}
    chat = Chat([{"role": "assistant", "content": None, "tool_calls": [call]}])
    return byte_level_tokenizer(chat_template=template).render_chat(chat)


def test_arguments_of_tool_calls_are_maps_for_the_template() -> None:
    """The OpenAI API has them as JSON text, and templates go through their items."""
    assert _with_call(MAPS) == "[('x', [1, 'é'])]"
    assert _with_call(MAPS, arguments={"x": 1}) == "[('x', 1)]"
    assert _with_call(MAPS, arguments="") == "[]"


def test_arguments_stay_text_for_a_template_that_joins_them() -> None:
    """A template that fails over maps gets what the client sent."""
    assert _with_call(TEXTS) == """call {"x": [1, "é"]}"""


@pytest.mark.parametrize("arguments", ["{", "[1]", "7", "[" * 100_000])
def test_arguments_that_are_no_map_stay_text(arguments: str) -> None:
    """A model's own malformed call does not end the chat in which it was made."""
    assert _with_call(TEXTS, arguments=arguments) == f"call {arguments}"


def test_null_fields_are_absent() -> None:
    """B41: a message with tool_calls null has no tool calls, and content null is no text."""
    template = "{{ messages[0].tool_calls is defined }}{{ messages[0].content }}."
    chat = Chat([{"role": "assistant", "content": None, "tool_calls": None}])
    assert byte_level_tokenizer(chat_template=template).render_chat(chat) == "False."


def test_an_answer_of_a_tool_is_rendered() -> None:
    """A tool's message keeps its role, its call's id, and its text."""
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.tool_call_id }}: {{ m.content }}{% endfor %}"
    )
    chat = Chat(
        [{"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4"}]}]
    )
    assert byte_level_tokenizer(chat_template=template).render_chat(chat) == "tool c1: 4"


def test_two_turns_of_the_user_are_the_template_s_to_refuse() -> None:
    """B41: roles user, user pass where the template takes them, and else fail in its words."""
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert BYTE_LEVEL.render_chat(Chat([USER, USER])).count("[user]Hi") == 2
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        byte_level_tokenizer(chat_template=strict).render_chat(Chat([USER, USER]))


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


def test_tools_reach_the_template() -> None:
    """The template sees them as they were sent; without any it sees none."""
    tokenizer = byte_level_tokenizer(chat_template="{{ tools | tojson }}")
    assert tokenizer.render_chat(Chat([USER], tools=[TOOL])) == json.dumps([TOOL])
    assert tokenizer.render_chat(Chat([USER])) == "null"


def test_a_template_for_tools_is_taken_when_there_are_some() -> None:
    """Models with two templates have one for chats with tools."""
    tokenizer = byte_level_tokenizer(tool_template="{{ tools[0].function.name }}")
    assert tokenizer.render_chat(Chat([USER], tools=[TOOL])) == "look_up"
    assert tokenizer.render_chat(Chat([USER])).startswith("<s>[user]")


def test_tools_that_a_template_would_not_show_are_refused() -> None:
    """A model that never hears of its tools cannot call them, so the request is told."""
    with pytest.raises(InvalidRequest, match="no place for tools"):
        BYTE_LEVEL.render_chat(Chat([USER], tools=[TOOL]))


def test_variables_reach_the_template() -> None:
    """What a template asks for by name can be set; others do nothing, as in transformers."""
    tokenizer = byte_level_tokenizer(chat_template="{{ 'hm' if enable_thinking else 'so' }}")
    thinking = {"enable_thinking": True, "other": [1]}
    assert tokenizer.render_chat(Chat([USER], variables=thinking)) == "hm"
    assert tokenizer.render_chat(Chat([USER])) == "so"


def test_variables_that_trip_the_template_fail_the_request_alone() -> None:
    """Documents have to be maps, as transformers says."""
    with pytest.raises(InvalidRequest, match="Documents"):
        BYTE_LEVEL.render_chat(Chat([USER], variables={"documents": ["x"]}))
