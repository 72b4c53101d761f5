"""The body of an OpenAI batch line, mapped to our words.

Three kinds of field exist: those that we take, those that are ignored on purpose because they do
not change the answer, and the others. One of the others makes its line an error, because an answer
that silently ignores it would answer another question.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from headrace.errors import InvalidRequest
from headrace.protocol import check_prompt
from headrace.sampling import SamplingParams
from headrace.types import Message

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

COMPLETIONS_MAX_TOKENS = 16
"""What the OpenAI API takes when a completions body names no ``max_tokens``."""

# Those whose spelling differs between the two APIs are mapped below.
SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)} - {"max_tokens", "logprobs"}

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
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields that are taken only at the value at which they ask for nothing."""


@dataclass(frozen=True, slots=True)
class BatchBody:
    """What one line asks for."""

    sampling: SamplingParams
    prompt: str | list[int] | None  # exactly one of prompt and messages
    messages: list[Message] | None
    model: str | None  # None: whatever the queue's workers serve


def read_body(url: str, body: object, default_max_tokens: int | None = None) -> BatchBody:
    """Check a body and map it; raises InvalidRequest that names the field and its value."""
    if not isinstance(body, dict):
        raise InvalidRequest(f"body must be an object, not {body!r}")
    # The OpenAI API reads null as "not given".
    given = {name: value for name, value in body.items() if value is not None}
    is_chat = url == CHAT_URL
    _refuse_unknown(given, is_chat)
    return BatchBody(
        sampling=_sampling(given, is_chat, default_max_tokens),
        prompt=None if is_chat else _prompt(given.get("prompt")),
        messages=_messages(given.get("messages")) if is_chat else None,
        model=_model(given.get("model")),
    )


def _refuse_unknown(given: dict[str, Any], is_chat: bool) -> None:
    own = {"messages", "top_logprobs", "max_completion_tokens"} if is_chat else {"prompt"}
    taken = SAMPLING_FIELDS | IGNORED_FIELDS | own | {"model", "max_tokens", "logprobs"}
    for name, value in given.items():
        if name in NEUTRAL_VALUES:
            # == alone would take 0 for false and 1.0 for 1.
            if not any(type(value) is type(v) and value == v for v in NEUTRAL_VALUES[name]):
                raise InvalidRequest(f"{name} = {value!r} is not supported")
        elif name not in taken:
            raise InvalidRequest(f"{name!r} is not supported; it would change the answer")


def _sampling(
    given: dict[str, Any], is_chat: bool, default_max_tokens: int | None
) -> SamplingParams:
    options = {name: value for name, value in given.items() if name in SAMPLING_FIELDS}
    options["max_tokens"] = _max_tokens(given, is_chat, default_max_tokens)
    options["logprobs"] = _chat_logprobs(given) if is_chat else given.get("logprobs")
    return SamplingParams.from_wire(options)


def _max_tokens(given: dict[str, Any], is_chat: bool, default: int | None) -> object:
    old, new = given.get("max_tokens"), given.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise InvalidRequest(f"max_tokens {old!r} and max_completion_tokens {new!r} disagree")
    limit = new if new is not None else old
    if limit is not None:
        return limit
    return default if default is not None or is_chat else COMPLETIONS_MAX_TOKENS


def _chat_logprobs(given: dict[str, Any]) -> object:
    wanted, top = given.get("logprobs", False), given.get("top_logprobs")
    if not isinstance(wanted, bool):
        raise InvalidRequest(f"logprobs must be true or false, not {wanted!r}")
    if top is not None and not wanted:
        raise InvalidRequest(f"top_logprobs {top!r} needs logprobs = true")
    return (top if top is not None else 0) if wanted else None


def _prompt(prompt: object) -> str | list[int]:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise InvalidRequest("prompt holds several prompts; give each a line of its own")
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
    return messages


def _model(model: object) -> str | None:
    if model is not None and not isinstance(model, str):
        raise InvalidRequest(f"model must be text, not {model!r}")
    return model
