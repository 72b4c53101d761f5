"""Chat templates: Jinja from the model's files, run in transformers' sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jinja2

from headrace.errors import InvalidRequest
from headrace.types import Message
from headrace_worker.serving.chat_content import ContentForm, find_form, shape_content

# What a template's expressions raise over messages that they were not written for.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
)
MAX_REASON = 500  # characters of what a template raises; it may quote the messages
_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True, slots=True)
class Chat:
    """What a request hands to the template; untrusted, and plain JSON throughout."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()  # functions that the model may call, as JSON schemas
    variables: Mapping[str, Any] = field(default_factory=dict)  # others, such as enable_thinking


def render_chat(
    template: str,  # Jinja source; compiled once, transformers keeps the result
    special_tokens: Mapping[str, str],  # {"bos_token": "<s>", ...}
    chat: Chat,
) -> str:
    """Return the prompt, up to where the assistant begins to speak; raises InvalidRequest.

    Tool calls come with their arguments as JSON text, as the OpenAI API has them, and most
    templates want maps. One that fails over maps gets the text as it came.
    """
    if chat.tools and not _TOOLS.search(template):
        raise InvalidRequest("this model's chat template has no place for tools")
    form = _content_form(template, tuple(special_tokens.items()))
    messages = [_shape(message, form) for message in chat.messages]
    with_maps = [_with_mapped_arguments(message) for message in messages]
    try:
        return _render(template, special_tokens, chat, with_maps)
    except _TEMPLATE_ERRORS as error:
        if with_maps != messages:
            try:
                return _render(template, special_tokens, chat, messages)
            except _TEMPLATE_ERRORS:
                pass  # the first error says more
        reason = str(error)[:MAX_REASON]
        raise InvalidRequest(f"the chat template refuses the messages: {reason}") from error


def _render(
    template: str,
    special_tokens: Mapping[str, str],
    chat: Chat,
    messages: Sequence[Message],
) -> str:
    # Half a second, for the first chat only: a worker of token-id prompts never needs it.
    from transformers.utils import chat_template_utils

    # Annotated to return text, it returns texts and positions.
    render: Any = chat_template_utils.render_jinja_template
    rendered, _ = render(
        [messages],
        tools=list(chat.tools) or None,
        chat_template=template,
        add_generation_prompt=True,
        **{**special_tokens, **chat.variables},
    )
    return str(rendered[0])


@lru_cache(maxsize=8)  # one or two a model
def _content_form(template: str, special_tokens: tuple[tuple[str, str], ...]) -> ContentForm:
    def try_content(content: object) -> str:
        message = {"role": "user", "content": content}
        try:
            return _render(template, dict(special_tokens), Chat(()), [message])
        except _TEMPLATE_ERRORS:
            return ""

    return find_form(try_content)


def _shape(message: Message, form: ContentForm) -> Message:
    """Return the message without nulls, which templates trip over, and with content."""
    given = {key: value for key, value in message.items() if value is not None}
    return {**given, "content": shape_content(message.get("content"), form)}


def _with_mapped_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_map(call) for call in calls]}


def _with_map(call: Any) -> Any:
    match call:
        case {"function": {"arguments": str(arguments)} as function}:
            return {**call, "function": {**function, "arguments": _as_map(arguments)}}
        case _:
            return call


def _as_map(arguments: str) -> object:
    """What is no JSON map stays text: models have said worse, and the chat goes on."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
