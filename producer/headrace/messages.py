"""What a chat message must have to say: content, unless an assistant calls tools instead."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.checks import shown
from headrace.errors import InvalidRequest
from headrace.types import Message


def check_contents(messages: Sequence[Message]) -> None:
    """Raise InvalidRequest that names a message without content; each is a map with a role.

    Such a message would be rendered as one that says nothing, which nobody asks for on purpose.
    Empty text is content.
    """
    for place, message in enumerate(messages):
        content = message.get("content")
        if content not in (None, []) or _calls_tools(message):
            continue
        raise InvalidRequest(
            f"messages[{place}].content must be text or a list of parts, not {shown(content)};"
            f" the role is {shown(message['role'])}, and only an assistant's message with"
            " tool_calls goes without"
        )


def _calls_tools(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("tool_calls"))
