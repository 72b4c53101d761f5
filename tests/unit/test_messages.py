"""Messages without content: refused by place and role, but for an assistant that calls tools."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.cli.batch_body import CHAT_URL, read_body
from headrace.errors import InvalidRequest
from headrace.messages import check_contents
from headrace.packing import pack
from headrace.protocol import VERSION, decode_request

USER = {"role": "user", "content": "Hi"}
CALL = {"function": {"name": "f", "arguments": "{}"}}
WITHOUT = [{}, {"content": None}, {"content": []}]


@pytest.mark.parametrize("content", WITHOUT)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_message_without_content_is_refused_by_place(role: str, content: dict[str, Any]) -> None:
    """B41: null, no or no parts of content would be a turn that says nothing."""
    with pytest.raises(
        InvalidRequest, match=rf"messages\[1\]\.content must be .* role is '{role}'"
    ):
        check_contents([USER, {"role": role, **content}])


@pytest.mark.parametrize("content", WITHOUT)
def test_an_assistant_that_calls_tools_needs_no_content(content: dict[str, Any]) -> None:
    """OpenAI's own client sends such turns back with content null."""
    check_contents([USER, {"role": "assistant", "tool_calls": [CALL], **content}])


@pytest.mark.parametrize("calls", [None, []])
def test_no_calls_are_no_reason_to_say_nothing(calls: object) -> None:
    """An empty list of tool calls stands in no message's place."""
    with pytest.raises(InvalidRequest, match="not None"):
        check_contents([{"role": "assistant", "content": None, "tool_calls": calls}])


def test_a_user_who_calls_tools_needs_content() -> None:
    """Only an assistant calls tools."""
    with pytest.raises(InvalidRequest, match="role is 'user'"):
        check_contents([{"role": "user", "tool_calls": [CALL]}])


@pytest.mark.parametrize("content", ["", "Hi", [{"type": "text", "text": ""}]])
def test_empty_text_is_content(content: object) -> None:
    """Who sends it means it."""
    check_contents([{"role": "user", "content": content}])


def test_it_is_refused_on_a_line_and_on_the_wire() -> None:
    """The asker hears it before anything is sent, and a worker does not trust the asker."""
    messages = [{"role": "user", "content": None}]
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content"):
        read_body(CHAT_URL, {"messages": messages})
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content"):
        decode_request(pack({"v": VERSION, "id": "r", "t": "default", "m": messages}))
