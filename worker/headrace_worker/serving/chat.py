"""Chat templates: Jinja from the model's files, run in transformers' sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from headrace.errors import InvalidRequest
from headrace.types import Message

# What a template's expressions raise over messages that they were not written for.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
)


def render_chat(
    template: str,  # Jinja source; compiled once, transformers keeps the result
    special_tokens: Mapping[str, str],  # {"bos_token": "<s>", ...}
    messages: Sequence[Message],  # untrusted
) -> str:
    """Return the prompt, up to where the assistant begins to speak; raises InvalidRequest."""
    # Half a second, for the first chat only: a worker of token-id prompts never needs it.
    from transformers.utils import chat_template_utils

    # Annotated to return text, it returns texts and positions.
    render: Any = chat_template_utils.render_jinja_template
    chat = [_flatten(message) for message in messages]
    try:
        rendered, _ = render(
            [chat], chat_template=template, add_generation_prompt=True, **special_tokens
        )
    except _TEMPLATE_ERRORS as error:
        raise InvalidRequest(f"the chat template refuses the messages: {error}") from error
    return str(rendered[0])


def _flatten(message: Message) -> Message:
    """Return the message with plain text as its content: templates of text models know no other."""
    return {**message, "content": _text_of(message.get("content"))}


def _text_of(content: object) -> str:
    """Absent and null content is no text; parts are joined as they stand."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"content must be text or a list of parts, not {content!r}")
    return "".join(map(_text_of_part, content))


def _text_of_part(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": kind}:
            raise InvalidRequest(f"content parts must be of type 'text', not {kind!r}")
        case _:
            raise InvalidRequest(f"a content part must have a type, not {part!r}")
