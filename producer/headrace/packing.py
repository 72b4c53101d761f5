"""Msgpack with limits: nothing read from the wire is too big, too deep, or code."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from headrace.checks import shown
from headrace.errors import ErrorCode, InvalidRequest

T = TypeVar("T")

MAX_PAYLOAD_BYTES = 2 * 1024 * 1024
MAX_PROMPT_TOKENS = 262_144
MAX_MAP_ENTRIES = 4_096
MAX_CONTAINERS = 16_384
MAX_DEPTH = 64  # a JSON schema takes two or three levels for one of its own


@dataclass(frozen=True, slots=True)
class Limits:
    """What a message may hold."""

    num_bytes: int
    num_containers: int  # arrays and maps


REQUEST = Limits(MAX_PAYLOAD_BYTES, MAX_CONTAINERS)
LOG_ENTRY = Limits(3 * MAX_PAYLOAD_BYTES, MAX_CONTAINERS + MAX_PROMPT_TOKENS)
"""For what workers write: the logprobs of a prompt are an array a token."""


def pack(body: object) -> bytes:
    """Encode plain values; raises TypeError, ValueError or OverflowError."""
    return bytes(msgpack.packb(body, use_bin_type=True))


def unpack(data: bytes, limits: Limits = REQUEST) -> Any:
    """Decode within limits on size, arrays, maps, containers and depth; no extension types."""
    if len(data) > limits.num_bytes:
        raise InvalidRequest(
            f"{len(data)} bytes, at most {limits.num_bytes} are taken", code=ErrorCode.UNDECODABLE
        )
    # A container takes a byte at least, so what is short holds few and is not deep: most chunks
    # of tokens are, and are not made to pay for the counting.
    may_be_bomb = len(data) > limits.num_containers
    hooks = _ContainerCount(limits.num_containers).hooks if may_be_bomb else {}
    try:
        value = msgpack.unpackb(
            data,
            strict_map_key=False,
            ext_hook=_refuse_extension,
            max_array_len=MAX_PROMPT_TOKENS,
            max_map_len=MAX_MAP_ENTRIES,
            max_ext_len=0,
            **hooks,
        )
        if len(data) > MAX_DEPTH:
            _check_depth(value, MAX_DEPTH)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise InvalidRequest(
            f"not readable as msgpack: {error or type(error).__name__}", code=ErrorCode.UNDECODABLE
        ) from error
    return value


def unpack_map(data: bytes, limits: Limits = REQUEST) -> dict[str, Any]:
    """Decode a map; raises InvalidRequest with code UNDECODABLE."""
    body = unpack(data, limits)
    if not isinstance(body, dict):
        raise InvalidRequest(
            f"expected a map, got {type(body).__name__}", code=ErrorCode.UNDECODABLE
        )
    return body


def list_of(values: object, kind: type[T]) -> list[T]:
    """Return the list, or raise TypeError that names the first element of another type."""
    if not isinstance(values, list):
        raise TypeError(f"expected a list, got {type(values).__name__}")
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"expected {kind.__name__}, got {shown(value)}")
    return values


def text(name: str, value: object) -> str:
    """Return the text, or raise InvalidRequest that names the value."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be text, not {shown(value)}")
    return value


def optional_text(name: str, value: object) -> str | None:
    """Return the text or None, or raise InvalidRequest that names the value."""
    return None if value is None else text(name, value)


def finite(name: str, value: object) -> float:
    """Return the number, or raise ValueError where it is none, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {shown(value)}")
    return float(value)


def _refuse_extension(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code} with {len(data)} bytes")


class _ContainerCount:
    """Stops the decoding of a memory bomb: an empty map is 1 byte on the wire and 64 in memory."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = most

    @property
    def hooks(self) -> dict[str, Callable[[Any], Any]]:
        """What the decoder calls at each container."""
        return {"list_hook": self._one_more, "object_hook": self._one_more}

    def _one_more(self, container: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"more than {self._most} arrays and maps")
        return container


def _check_depth(value: object, left: int) -> None:
    if isinstance(value, dict | list):
        if left == 0:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, dict | list):
                _check_depth(item, left - 1)
