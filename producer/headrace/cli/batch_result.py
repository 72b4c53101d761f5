"""Result lines in the OpenAI batch shape: one strict JSON object a line, answer or error."""

from __future__ import annotations

import json
from typing import Any

from headrace.cli.batch_body import CHAT_URL
from headrace.cli.batch_file import BatchRequest, shorten
from headrace.cli.batch_logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from headrace.errors import ErrorCode
from headrace.types import Completion

HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: 400,
    ErrorCode.KV_CAPACITY_EXCEEDED: 400,
    ErrorCode.UNDECODABLE: 400,
    ErrorCode.UNSUPPORTED_VERSION: 400,
    ErrorCode.UNKNOWN_MODEL: 404,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.CANCELLED: 499,
    ErrorCode.CONFLICT: 409,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.DEADLINE_EXCEEDED: 408,
    ErrorCode.RESULT_EXPIRED: 410,
    ErrorCode.LOST: 503,
    ErrorCode.DEAD_LETTERED: 500,
    ErrorCode.ENGINE_FAILURE: 500,
}
"""What an HTTP service would have answered; the codes of a bad line count as 400."""

_LINE_BREAKS = str.maketrans(
    {"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}  # JSON allows them raw, but
)  # readers that split on every Unicode line break would cut a line in two


def answer_line(
    line_id: str, request: BatchRequest, completion: Completion, *, model: str, created_s: int
) -> dict[str, Any]:
    """Return the result line of an answered request; ``created_s`` is Unix time."""
    is_chat = request.url == CHAT_URL
    choices = completion.choices or (completion,)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{completion.request_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created_s,
        "model": model,
        "choices": [_choice(index, choice, request) for index, choice in enumerate(choices)],
        "usage": _usage(choices),
    }
    if is_chat:
        body |= _prompt_logprobs(completion)
    response = {"status_code": 200, "request_id": completion.request_id, "body": body}
    return {"id": line_id, "custom_id": request.custom_id, "response": response, "error": None}


def error_line(
    line_id: str, custom_id: str | None, code: str, message: str, request_id: str | None = None
) -> dict[str, Any]:
    """Return the result line of a request without an answer.

    ``request_id`` is None for what never reached the queue.
    """
    error = {"code": code, "message": shorten(message)}
    body = {"error": {**error, "type": "invalid_request_error", "param": None}}
    status_code = HTTP_STATUS[ErrorCode(code)] if code in HTTP_STATUS else 400
    if status_code >= 500:
        body["error"]["type"] = "server_error"
    response = {"status_code": status_code, "request_id": request_id, "body": body}
    return {"id": line_id, "custom_id": custom_id, "response": response, "error": error}


def encode_line(line: dict[str, Any]) -> bytes:
    """Encode one result line with its line feed; raises ValueError for what JSON cannot hold."""
    text = json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    try:
        return text.translate(_LINE_BREAKS).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(line, allow_nan=False).encode() + b"\n"


def _choice(index: int, completion: Completion, request: BatchRequest) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index}
    if request.url == CHAT_URL:
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        choice |= {"message": message, "logprobs": chat_logprobs(completion)}
    else:
        logprobs = completion_logprobs(completion, request.body)
        choice |= {"text": completion.text, "logprobs": logprobs}
        choice |= _prompt_logprobs(completion)
    return {**choice, "finish_reason": completion.finish_reason.value}


def _prompt_logprobs(completion: Completion) -> dict[str, Any]:
    """They are vLLM's, and stand where vLLM puts them: a chat has them once, beside its choices."""
    scores = completion.prompt_logprobs
    return {} if scores is None else {"prompt_logprobs": prompt_logprobs(scores)}


def _usage(choices: tuple[Completion, ...]) -> dict[str, Any]:
    """The prompt counts once, however many answers it got."""
    prompt_tokens = choices[0].usage.prompt_tokens
    completion_tokens = sum(choice.usage.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": choices[0].usage.cached_tokens},
    }
