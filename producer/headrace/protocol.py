"""Every message on the wire: a dataclass, how it is encoded, how it is decoded, and its version.

Three messages cross Redis: the request that a client enqueues, a chunk of the token log, and the
terminal entry that ends the log. Nothing read from the wire selects code; unknown versions and
extension types are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.checks import shown
from headrace.errors import ErrorCode, InvalidRequest, ProtocolError
from headrace.keys import check_request_id, check_tenant
from headrace.messages import check_contents
from headrace.metadata import checked_metadata
from headrace.packing import (
    LOG_ENTRY,
    MAX_PAYLOAD_BYTES,
    MAX_PROMPT_TOKENS,
    finite,
    list_of,
    optional_text,
    pack,
    text,
    unpack,
    unpack_map,
)
from headrace.sampling import SamplingParams
from headrace.scores import check_num_scores, flat_scores, read_prompt_scores, read_scores
from headrace.template_options import check_has_template, normal_template_kwargs, normal_tools
from headrace.types import FinishReason, Message, Timings, TokenLogprob, Usage

VERSION = 1

CHUNK_FIELD = b"c"
TERMINAL_FIELD = b"e"

_REQUEST_FIELDS = {"v", "id", "t", "m", "p", "s", "model", "meta", "tools", "tmpl"}


@dataclass(frozen=True, slots=True)
class RequestMessage:
    """What a client asks for; the payload that the request hash keeps until the end."""

    request_id: str
    tenant: str
    sampling: SamplingParams
    prompt: str | tuple[int, ...] | None = None  # text or token ids, or else messages
    messages: tuple[Message, ...] | None = None
    model: str | None = None  # None: whatever the queue's workers serve
    metadata: dict[str, Any] = field(default_factory=dict)  # handed back with the completion
    tools: tuple[dict[str, Any], ...] = ()  # for the chat template; only with messages
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # likewise


@dataclass(frozen=True, slots=True)
class ChunkMessage:
    """One entry of the token log; its entry id carries the end offset."""

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]  # text that each token added, one per token, often empty
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class TerminalMessage:
    """The one entry that ends a token log."""

    finish_reason: FinishReason
    text: str = ""  # tail held back until now
    usage: Usage | None = None
    timings: Timings | None = None
    error_code: ErrorCode | None = None  # set if and only if finish_reason is ERROR or CANCELLED
    error_message: str = ""
    worker_id: str | None = None  # who wrote it; None: the queue itself
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # one per token, first None


def encode_request(message: RequestMessage) -> bytes:
    """Encode a request; raises InvalidRequest when it is larger than MAX_PAYLOAD_BYTES."""
    body: dict[str, Any] = {"v": VERSION, "id": message.request_id, "t": message.tenant}
    if message.messages is not None:
        body["m"] = message.messages
    if message.prompt is not None:
        body["p"] = message.prompt
    if sampling := message.sampling.to_wire():
        body["s"] = sampling
    if message.model is not None:
        body["model"] = message.model
    if message.metadata:
        body["meta"] = message.metadata
    if message.tools:
        body["tools"] = message.tools
    if message.chat_template_kwargs:
        body["tmpl"] = message.chat_template_kwargs
    return _pack_payload(body)


def decode_request(payload: bytes) -> RequestMessage:
    """Decode an untrusted request.

    Raises InvalidRequest that names the value at fault, with code UNDECODABLE, UNSUPPORTED_VERSION
    or INVALID_REQUEST.
    """
    body = unpack_map(payload)
    version = body.get("v")
    if version != VERSION or isinstance(version, bool):
        raise InvalidRequest(
            f"protocol version {shown(version)} is not {VERSION}",
            code=ErrorCode.UNSUPPORTED_VERSION,
        )
    _refuse_unknown(body)
    message = RequestMessage(
        request_id=check_request_id(body.get("id", "")),
        tenant=check_tenant(body.get("t", "")),
        sampling=SamplingParams.from_wire(body.get("s", {})),
        prompt=_decode_prompt(body.get("p")),
        messages=_decode_messages(body.get("m")),
        model=optional_text("model", body.get("model")),
        metadata=checked_metadata(body.get("meta")),
        tools=normal_tools(body.get("tools")),
        chat_template_kwargs=normal_template_kwargs(body.get("tmpl")),
    )
    check_prompt(message.prompt, message.messages)
    check_contents(message.messages or ())
    check_has_template(message.messages, message.tools, message.chat_template_kwargs)
    if isinstance(message.prompt, tuple):  # text is counted by the worker
        check_num_scores(len(message.prompt), message.sampling.prompt_logprobs)
    if message.sampling.n != 1:  # the client sends n requests instead
        raise InvalidRequest(f"n {message.sampling.n} never travels; send n requests")
    return message


def check_prompt(prompt: object, messages: object) -> None:
    """Raise InvalidRequest unless exactly one of the two is given and it is not empty."""
    if (prompt is None) == (messages is None):
        given = "both were" if prompt is not None else "neither was"
        raise InvalidRequest(f"give exactly one of prompt and messages; {given} given")
    if prompt is not None and not prompt:
        raise InvalidRequest(f"prompt is empty: {prompt!r}")
    if isinstance(prompt, tuple) and len(prompt) > MAX_PROMPT_TOKENS:
        raise InvalidRequest(
            f"prompt has {len(prompt)} token ids, at most {MAX_PROMPT_TOKENS} are taken"
        )
    if messages is not None and not messages:
        raise InvalidRequest("messages is empty: []")


def encode_chunk(message: ChunkMessage) -> bytes:
    """Encode the value of CHUNK_FIELD: ``[token ids, pieces]`` and, if asked for, logprobs."""
    body: list[Any] = [message.token_ids, message.pieces]
    if message.logprobs is not None:
        body.append(flat_scores(message.logprobs))
    return pack(body)


def decode_chunk(data: bytes) -> ChunkMessage:
    """Decode a chunk; raises ProtocolError."""
    try:
        token_ids, pieces, *rest = list_of(unpack(data), object)
        ids = tuple(list_of(token_ids, int))
        texts = tuple(list_of(pieces, str))
        if not ids or len(ids) != len(texts):
            raise ValueError(f"{len(ids)} token ids with {len(texts)} pieces")
        return ChunkMessage(ids, texts, _decode_logprobs(rest, len(ids)))
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"unreadable chunk of {len(data)} bytes: {error}") from error


def encode_terminal(message: TerminalMessage) -> bytes:
    """Encode the value of TERMINAL_FIELD; fields at their defaults are left out."""
    body: dict[str, Any] = {"v": VERSION, "reason": message.finish_reason.value}
    if message.text:
        body["text"] = message.text
    if (usage := message.usage) is not None:
        body["usage"] = [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens]
    if (timings := message.timings) is not None:
        body["times"] = [timings.queue_s, timings.ttft_s, timings.tpot_s, timings.e2e_s]
    if message.error_code is not None:
        body["code"] = message.error_code.value
        body["error"] = message.error_message
    if message.worker_id is not None:
        body["worker"] = message.worker_id
    if message.prompt_logprobs is not None:
        body["plp"] = flat_scores(message.prompt_logprobs)
    return pack(body)


def decode_terminal(data: bytes) -> TerminalMessage:
    """Decode a terminal entry; raises ProtocolError."""
    try:
        body = unpack_map(data, LOG_ENTRY)
        if body.get("v") != VERSION or isinstance(body["v"], bool):
            raise ValueError(f"protocol version {body.get('v')!r} is not {VERSION}")
        message = TerminalMessage(
            finish_reason=FinishReason(body["reason"]),
            text=text("text", body.get("text", "")),
            usage=_decode_usage(body.get("usage")),
            timings=_decode_timings(body.get("times")),
            error_code=ErrorCode(body["code"]) if "code" in body else None,
            error_message=text("error", body.get("error", "")),
            worker_id=optional_text("worker", body.get("worker")),
            prompt_logprobs=read_prompt_scores(body.get("plp")),
        )
        went_wrong = message.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED)
        if went_wrong != (message.error_code is not None):
            raise ValueError(f"reason {message.finish_reason} with code {message.error_code}")
        return message
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"unreadable terminal entry of {len(data)} bytes: {error}") from error


def _pack_payload(body: dict[str, Any]) -> bytes:
    try:
        payload = pack(body)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"the request cannot be encoded: {error}") from error
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise InvalidRequest(
            f"the request has {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are taken"
        )
    return payload


def _refuse_unknown(body: dict[str, Any]) -> None:
    """What a newer client asks for is refused, as an answer without it answers another question."""
    for name in body:
        if name not in _REQUEST_FIELDS:
            raise InvalidRequest(f"unknown request field {shown(name)}")


def _decode_prompt(prompt: object) -> str | tuple[int, ...] | None:
    if prompt is None or isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidRequest(
            f"prompt must be text or a list of token ids, not {type(prompt).__name__}"
        )
    for token_id in prompt:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise InvalidRequest(f"prompt holds {shown(token_id)}, which is not a token id")
    return tuple(prompt)


def _decode_messages(messages: object) -> tuple[Message, ...] | None:
    if messages is None:
        return None
    if not isinstance(messages, list):
        raise InvalidRequest(f"messages must be a list, not {type(messages).__name__}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"a message must be a map with a role, not {shown(message)}")
    return tuple(messages)


def _decode_logprobs(rest: list[Any], num_tokens: int) -> tuple[TokenLogprob, ...] | None:
    if not rest:
        return None
    (rows,) = rest
    if len(rows) != num_tokens:
        raise ValueError(f"{len(rows)} logprobs with {num_tokens} token ids")
    return read_scores(rows)


def _decode_usage(counts: object) -> Usage | None:
    if counts is None:
        return None
    prompt, completion, cached = list_of(counts, int)
    if min(prompt, completion, cached) < 0:
        raise ValueError(f"a count of tokens is negative in {counts!r}")
    return Usage(prompt, completion, cached)


def _decode_timings(times: object) -> Timings | None:
    if times is None:
        return None
    queue_s, ttft_s, tpot_s, e2e_s = list_of(times, object)
    return Timings(
        queue_s=finite("queue_s", queue_s),
        ttft_s=None if ttft_s is None else finite("ttft_s", ttft_s),
        tpot_s=None if tpot_s is None else finite("tpot_s", tpot_s),
        e2e_s=finite("e2e_s", e2e_s),
    )
