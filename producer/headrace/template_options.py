"""What a request hands to the chat template beside its messages: tools, and variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.checks import plain_json, shown
from headrace.errors import InvalidRequest

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 1024  # as JSON
MAX_TEMPLATE_KWARGS_BYTES = 16 * 1024

RESERVED = frozenset({
    "messages",
    "conversation",
    "conversations",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
    "tokenize",
})  # fmt: skip
"""Names that the worker itself gives to the template; a template from the wire would be code."""


def normal_tools(tools: object) -> tuple[dict[str, Any], ...]:
    """Return a copy of the tools, empty for None; raises InvalidRequest that names the value."""
    if tools is None:
        return ()
    if not isinstance(tools, list | tuple):
        raise InvalidRequest(f"tools must be a list, not {shown(tools)}")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} entries, at most {MAX_TOOLS} are taken")
    for tool in tools:
        if not isinstance(tool, Mapping) or not tool:
            raise InvalidRequest(f"tools must hold maps, not {shown(tool)}")
    return tuple(plain_json("tools", tools, MAX_TOOLS_BYTES))


def normal_template_kwargs(kwargs: object) -> dict[str, Any]:
    """Return a copy of the variables, empty for None; raises InvalidRequest."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise InvalidRequest(f"chat_template_kwargs must be a map, not {shown(kwargs)}")
    plain: dict[str, Any] = plain_json("chat_template_kwargs", kwargs, MAX_TEMPLATE_KWARGS_BYTES)
    for name in plain:
        if not name.isidentifier():
            raise InvalidRequest(f"chat_template_kwargs has {shown(name)}, which is no name")
        if name in RESERVED:
            raise InvalidRequest(f"chat_template_kwargs must not set {name!r}")
    return plain


def check_has_template(messages: object, tools: object, kwargs: object) -> None:
    """Raise InvalidRequest where there is something for a chat template, but no chat."""
    for name, value in (("tools", tools), ("chat_template_kwargs", kwargs)):
        if value and messages is None:
            raise InvalidRequest(f"{name} needs messages: a prompt meets no chat template")
