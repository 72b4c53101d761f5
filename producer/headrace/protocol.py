"""Every message on the wire: a dataclass, how it is encoded, how it is decoded, and its version.

Three messages cross Redis: the request that a client enqueues, a chunk of the token log, and the
terminal entry that ends the log. Nothing read from the wire selects code; unknown versions and
extension types are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from headrace.errors import ErrorCode, InvalidRequest, ProtocolError
from headrace.keys import check_request_id, check_tenant
from headrace.sampling import SamplingParams
from headrace.types import FinishReason, Message, Timings, TokenLogprob, Usage

VERSION = 1

MAX_PAYLOAD_BYTES = 2 * 1024 * 1024
MAX_PROMPT_TOKENS = 262_144
MAX_MAP_ENTRIES = 4_096
MAX_METADATA_BYTES = 16 * 1024
MAX_DEPTH = 16

CHUNK_FIELD = b"c"
TERMINAL_FIELD = b"e"


@dataclass(frozen=True, slots=True)
class RequestMessage:
    """What a client asks for; the payload that the request hash keeps until the end."""

    request_id: str
    tenant: str
    sampling: SamplingParams
    prompt: str | tuple[int, ...] | None = (
        None  # text or token ids; exactly one of prompt and messages
    )
    messages: tuple[Message, ...] | None = None
    model: str | None = None  # None: whatever the queue's workers serve
    metadata: dict[str, Any] = field(default_factory=dict)  # handed back with the completion


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


def encode_request(message: RequestMessage) -> bytes:
    """Encode a request; raises InvalidRequest when it is larger than MAX_PAYLOAD_BYTES."""
    body: dict[str, Any] = {"v": VERSION, "id": message.request_id, "t": message.tenant}
    if message.messages is not None:
        body["m"] = list(message.messages)
    if message.prompt is not None:
        body["p"] = message.prompt if isinstance(message.prompt, str) else list(message.prompt)
    if sampling := message.sampling.to_wire():
        body["s"] = sampling
    if message.model is not None:
        body["model"] = message.model
    if message.metadata:
        body["meta"] = message.metadata
    return _pack_payload(body)


def decode_request(payload: bytes) -> RequestMessage:
    """Decode an untrusted request.

    Raises InvalidRequest that names the value at fault, with code UNDECODABLE, UNSUPPORTED_VERSION
    or INVALID_REQUEST.
    """
    body = _unpack_map(payload)
    version = body.get("v")
    if version != VERSION or isinstance(version, bool):
        raise InvalidRequest(
            f"protocol version {version!r} is not {VERSION}", code=ErrorCode.UNSUPPORTED_VERSION
        )
    message = RequestMessage(
        request_id=check_request_id(body.get("id", "")),
        tenant=check_tenant(body.get("t", "")),
        sampling=SamplingParams.from_wire(body.get("s", {})),
        prompt=_decode_prompt(body.get("p")),
        messages=_decode_messages(body.get("m")),
        model=_optional_text("model", body.get("model")),
        metadata=_decode_metadata(body.get("meta")),
    )
    check_prompt(message.prompt, message.messages)
    return message


def check_prompt(prompt: object, messages: object) -> None:
    """Raise InvalidRequest unless exactly one of the two is given and it is not empty."""
    if (prompt is None) == (messages is None):
        given = "both" if prompt is not None else "neither"
        raise InvalidRequest(f"give exactly one of prompt and messages; {given} was given")
    if prompt is not None and not prompt:
        raise InvalidRequest(f"prompt is empty: {prompt!r}")
    if messages is not None and not messages:
        raise InvalidRequest("messages is empty: []")


def encode_chunk(message: ChunkMessage) -> bytes:
    """Encode the value of CHUNK_FIELD: ``[token ids, pieces]`` and, if asked for, logprobs."""
    body: list[Any] = [message.token_ids, message.pieces]
    if message.logprobs is not None:
        body.append([[p.token_id, p.logprob, p.top] for p in message.logprobs])
    return _pack(body)


def decode_chunk(data: bytes) -> ChunkMessage:
    """Decode a chunk; raises ProtocolError."""
    try:
        token_ids, pieces, *rest = _unpack(data)
        if len(token_ids) != len(pieces):
            raise ValueError(f"{len(token_ids)} token ids with {len(pieces)} pieces")
        return ChunkMessage(tuple(token_ids), tuple(pieces), _decode_logprobs(rest))
    except (TypeError, ValueError, InvalidRequest) as error:
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
    return _pack(body)


def decode_terminal(data: bytes) -> TerminalMessage:
    """Decode a terminal entry; raises ProtocolError."""
    try:
        body = _unpack_map(data)
        if body.get("v") != VERSION:
            raise ValueError(f"protocol version {body.get('v')!r} is not {VERSION}")
        return TerminalMessage(
            finish_reason=FinishReason(body["reason"]),
            text=body.get("text", ""),
            usage=Usage(*body["usage"]) if "usage" in body else None,
            timings=Timings(*body["times"]) if "times" in body else None,
            error_code=ErrorCode(body["code"]) if "code" in body else None,
            error_message=body.get("error", ""),
            worker_id=body.get("worker"),
        )
    except (KeyError, TypeError, ValueError, InvalidRequest) as error:
        raise ProtocolError(f"unreadable terminal entry of {len(data)} bytes: {error}") from error


def _pack(body: object) -> bytes:
    return bytes(msgpack.packb(body, use_bin_type=True))


def _pack_payload(body: dict[str, Any]) -> bytes:
    try:
        payload = _pack(body)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"the request cannot be encoded: {error}") from error
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise InvalidRequest(
            f"the request has {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are taken"
        )
    return payload


def _refuse_extension(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code} with {len(data)} bytes")


def _unpack(data: bytes) -> Any:
    """Decode within limits on size, arrays, maps and depth; extension types are refused."""
    if len(data) > MAX_PAYLOAD_BYTES:
        raise InvalidRequest(
            f"{len(data)} bytes, at most {MAX_PAYLOAD_BYTES} are taken", code=ErrorCode.UNDECODABLE
        )
    try:
        value = msgpack.unpackb(
            data,
            strict_map_key=False,
            ext_hook=_refuse_extension,
            max_array_len=MAX_PROMPT_TOKENS,
            max_map_len=MAX_MAP_ENTRIES,
            max_ext_len=0,
        )
        _check_depth(value, MAX_DEPTH)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise InvalidRequest(
            f"not readable as msgpack: {error}", code=ErrorCode.UNDECODABLE
        ) from error
    return value


def _check_depth(value: object, left: int) -> None:
    if isinstance(value, dict | list):
        if left == 0:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, dict | list):
                _check_depth(item, left - 1)


def _unpack_map(data: bytes) -> dict[str, Any]:
    body = _unpack(data)
    if not isinstance(body, dict):
        raise InvalidRequest(
            f"expected a map, got {type(body).__name__}", code=ErrorCode.UNDECODABLE
        )
    return body


def _decode_prompt(prompt: object) -> str | tuple[int, ...] | None:
    if prompt is None or isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidRequest(
            f"prompt must be text or a list of token ids, not {type(prompt).__name__}"
        )
    for token_id in prompt:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise InvalidRequest(f"prompt holds {token_id!r}, which is not a token id")
    return tuple(prompt)


def _decode_messages(messages: object) -> tuple[Message, ...] | None:
    if messages is None:
        return None
    if not isinstance(messages, list):
        raise InvalidRequest(f"messages must be a list, not {type(messages).__name__}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"a message must be a map with a role, not {message!r}")
    return tuple(messages)


def _decode_metadata(metadata: object) -> dict[str, Any]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise InvalidRequest(f"metadata must be a map, not {type(metadata).__name__}")
    return metadata


def _optional_text(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{name} must be text, not {value!r}")
    return value


def _decode_logprobs(rest: list[Any]) -> tuple[TokenLogprob, ...] | None:
    if not rest:
        return None
    return tuple(
        TokenLogprob(token_id, _finite(logprob), tuple((i, _finite(p)) for i, p in top))
        for token_id, logprob, top in rest[0]
    )


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"logprob {value!r} is not finite")
    return value
