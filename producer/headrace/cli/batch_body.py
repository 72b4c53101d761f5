"""The body of an OpenAI batch line, mapped to our words.

Three kinds of field exist: those that we take, those that are ignored on purpose because they do
not change the answer, and the others. One of the others makes its line an error, because an answer
that silently ignores it would answer another question.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any

from headrace.checks import shown
from headrace.cli.batch_sampling import SAMPLING_FIELDS, read_sampling
from headrace.errors import InvalidRequest
from headrace.messages import check_contents
from headrace.protocol import check_prompt
from headrace.sampling import SamplingParams
from headrace.template_options import normal_template_kwargs, normal_tools
from headrace.types import Message

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

IGNORED_FIELDS = {
    "user",
    "metadata",
    "store",
    "stream_options",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
}
"""Bookkeeping of the asker and of the service; none changes what the model answers."""

NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
}
"""Fields that are taken only at the value at which they ask for nothing.

The last four are vLLM's, and stand in bodies that spell out its defaults.
An answer is text: no tool call is read from it, so ``tool_choice`` cannot promise one.
"""

_INSTEAD = {
    "priority": "run-batch --priority is for all lines",
    "request_id": "a line has its custom_id",
    "cache_salt": "tenants never share a prefix cache",
    "return_token_ids": "logprobs name tokens by id",
    "messages": "it belongs to " + CHAT_URL,
    "prompt": "it belongs to " + COMPLETIONS_URL,
}
"""What to do instead of fields that people bring from OpenAI and vLLM."""

CHAT_FIELDS = {
    *("messages", "max_completion_tokens", "top_logprobs", "tools", "chat_template_kwargs"),
}
CHAT_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "echo": (False,),  # here it means that the answer continues the last message
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
}
COMPLETIONS_FIELDS = {"prompt", "echo"}
COMPLETIONS_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "add_special_tokens": (True,),
}


@dataclass(frozen=True, slots=True)
class BatchBody:
    """What one line asks for."""

    sampling: SamplingParams
    prompt: str | list[int] | None  # exactly one of prompt and messages
    messages: list[Message] | None
    model: str | None  # None: whatever the queue's workers serve
    tools: tuple[dict[str, Any], ...] = ()  # for the chat template, as are its variables
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


def read_body(url: str, body: object, default_max_tokens: int | None = None) -> BatchBody:
    """Check a body and map it; raises InvalidRequest that names the field and its value."""
    if not isinstance(body, dict):
        raise InvalidRequest(f"body must be an object, not {body!r}")
    # The OpenAI API reads null as "not given".
    given = {name: value for name, value in body.items() if value is not None}
    is_chat = url == CHAT_URL
    _refuse_unknown(given, is_chat)
    return BatchBody(
        sampling=read_sampling(given, is_chat, default_max_tokens),
        prompt=None if is_chat else _prompt(given.get("prompt")),
        messages=_messages(given.get("messages")) if is_chat else None,
        model=_model(given.get("model")),
        tools=_tools(given),
        chat_template_kwargs=normal_template_kwargs(given.get("chat_template_kwargs")),
    )


def _refuse_unknown(given: dict[str, Any], is_chat: bool) -> None:
    own = CHAT_FIELDS if is_chat else COMPLETIONS_FIELDS
    taken = SAMPLING_FIELDS | IGNORED_FIELDS | own | {"model"}
    neutral = NEUTRAL_VALUES | (CHAT_NEUTRAL_VALUES if is_chat else COMPLETIONS_NEUTRAL_VALUES)
    for name, value in given.items():
        if name in neutral:
            # == alone would take 0 for false and 1.0 for 1.
            if not any(type(value) is type(v) and value == v for v in neutral[name]):
                raise InvalidRequest(f"{name} = {shown(value)} is not supported")
        elif name not in taken:
            hint = _hint(name, taken | set(neutral))
            raise InvalidRequest(f"{name!r} is not supported here, given as {shown(value)}{hint}")


def _hint(name: str, known: set[str]) -> str:
    """Say what to write instead, where that is known or can be guessed."""
    if name in _INSTEAD:
        return f"; {_INSTEAD[name]}"
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.75)
    return f"; did you mean {near[0]!r}?" if near else ""


def _tools(given: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    tools = normal_tools(given.get("tools"))
    return () if given.get("tool_choice") == "none" else tools


def _prompt(prompt: object) -> str | list[int]:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise InvalidRequest(f"prompt holds {len(prompt)} prompts; give each a line of its own")
        (prompt,) = prompt  # a list of one is that one
    if isinstance(prompt, list):
        for token_id in prompt:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise InvalidRequest(f"prompt holds {token_id!r}, which is not a token id")
    elif not isinstance(prompt, str):
        raise InvalidRequest(f"prompt must be text or a list of token ids, not {prompt!r}")
    check_prompt(prompt, None)
    return prompt


def _messages(messages: object) -> list[Message]:
    if not isinstance(messages, list):
        raise InvalidRequest(f"messages must be a list, not {messages!r}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"a message must be an object with a role, not {message!r}")
    check_prompt(None, messages)
    check_contents(messages)
    return messages


def _model(model: object) -> str | None:
    if model is not None and not isinstance(model, str):
        raise InvalidRequest(f"model must be text, not {model!r}")
    return model
