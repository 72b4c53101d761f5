"""Hostile bytes: each kind of bad message is refused with a typed error and little memory."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ErrorCode, InvalidRequest, ProtocolError
from headrace.packing import (
    LOG_ENTRY,
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_MAP_ENTRIES,
    MAX_PAYLOAD_BYTES,
    MAX_PROMPT_TOKENS,
    pack,
    unpack,
    unpack_map,
)
from headrace.protocol import decode_chunk, decode_request, decode_terminal

MIB = 1024 * 1024


def _array(length: int, body: bytes) -> bytes:
    return b"\xdd" + struct.pack(">I", length) + body


def _nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\x90"


HOSTILE = {
    "nothing": b"",
    "one byte of garbage": b"\xc1",
    "truncated": pack({"v": 1, "id": "x"})[:-1],
    "bytes after the end": pack({}) + b"\x00",
    "too big": bytes(MAX_PAYLOAD_BYTES + 1),
    "extension type": msgpack.packb(msgpack.ExtType(5, b"rm -rf")),
    "timestamp": msgpack.packb(msgpack.Timestamp(1, 0)),
    "text that is not utf-8": b"\xa2\xff\xfe",
    "key that cannot be hashed": b"\x81\x90\x01",
    "nested too deep": _nested(MAX_DEPTH),
    "nested beyond the stack": _nested(100_000),
    "array too long": _array(MAX_PROMPT_TOKENS + 1, b"\x00" * (MAX_PROMPT_TOKENS + 1)),
    "array that claims more than it has": _array(2**32 - 1, b"\x00"),
    "map too long": pack(dict.fromkeys(range(MAX_MAP_ENTRIES + 1))),
    "bomb of empty maps": _array(MAX_PROMPT_TOKENS, b"\x80" * MAX_PROMPT_TOKENS),
    "bomb of arrays of empty arrays": pack([[[]] * 9000] * 29),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_are_undecodable(data: bytes) -> None:
    """Bytes that are no message of ours are refused with the code UNDECODABLE."""
    with pytest.raises(InvalidRequest) as caught:
        unpack_map(data)
    assert caught.value.code is ErrorCode.UNDECODABLE


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_in_a_token_log_are_protocol_errors(data: bytes) -> None:
    """A reader sees a ProtocolError for such bytes, in a chunk and in a terminal entry."""
    for decode in (decode_chunk, decode_terminal):
        with pytest.raises(ProtocolError):
            decode(data)


def test_bomb_costs_less_memory_than_twice_the_largest_payload() -> None:
    """A mebibyte of nested empty maps, 72 MiB when decoded freely, is stopped early."""
    bomb = _array(4, _array(MAX_PROMPT_TOKENS, b"\x80" * MAX_PROMPT_TOKENS) * 4)
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match=f"more than {MAX_CONTAINERS}"):
        unpack(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(bomb) > MIB
    assert peak < 2 * MAX_PAYLOAD_BYTES + MIB


def test_longest_prompt_is_decodable() -> None:
    """The limits leave room for a prompt of the greatest length."""
    assert len(unpack(pack([50_000] * MAX_PROMPT_TOKENS))) == MAX_PROMPT_TOKENS


def test_longest_prompt_has_room_for_its_logprobs() -> None:
    """What a worker writes may hold an array a token, which a request may not."""
    rows = _array(MAX_PROMPT_TOKENS, b"\x90" * MAX_PROMPT_TOKENS)
    assert len(unpack(rows, LOG_ENTRY)) == MAX_PROMPT_TOKENS
    with pytest.raises(InvalidRequest, match="arrays and maps"):
        unpack(rows)


def test_deepest_value_is_decodable() -> None:
    """Nesting as deep as the limit is taken; one level more is not."""
    assert unpack(_nested(MAX_DEPTH - 1))


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    """Whatever bytes arrive, the decoders return or raise their documented errors."""
    with contextlib.suppress(InvalidRequest):
        decode_request(data)
    for decode in (decode_chunk, decode_terminal):
        with contextlib.suppress(ProtocolError):
            decode(data)


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)  # fmt: skip
_fields = ["v", "id", "t", "s", "p", "m", "model", "meta", "reason", "text", "usage", "times"]
_newer = ["tools", "tmpl", "plp"]


@given(st.dictionaries(st.sampled_from([*_fields, *_newer, "code", "error", "worker"]), _values))
def test_no_fields_raise_anything_else(body: dict[str, object]) -> None:
    """Well-formed msgpack with values of any type in any field raises documented errors only."""
    for version in ({}, {"v": 1}):
        data = pack(body | version)
        with contextlib.suppress(InvalidRequest):
            decode_request(data)
        with contextlib.suppress(ProtocolError):
            decode_terminal(data)
