"""How a message becomes a frame: a length, then msgpack with a closed table of extension types.

::

    | length, 4 bytes big-endian | ext(code, msgpack of the fields in their order) |

The two ends are one release on one machine, so fields have no names; the table below is the whole
format.
"""

from __future__ import annotations

import struct
from dataclasses import fields
from typing import Any, get_args

import msgpack

from headrace_worker.engine import messages, orders
from headrace_worker.engine.settings import EngineSettings, Reserve

MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct(">I")

Message = EngineSettings | messages.Command | messages.Report | orders.Order

_CODES: dict[type, int] = {
    EngineSettings: 1,
    messages.AddSequence: 2,
    messages.AbortSequences: 3,
    messages.SetPaused: 4,
    messages.Ping: 5,
    messages.Shutdown: 6,
    messages.SetPriority: 7,
    messages.EngineReady: 16,
    messages.StepOutcome: 17,
    messages.Pong: 18,
    messages.EngineFailed: 19,
    messages.Bystanders: 20,
    messages.SamplingSpec: 32,
    messages.SampledToken: 33,
    messages.SequenceFailure: 34,
    messages.SequenceFinish: 35,
    Reserve: 36,
    messages.TokenScore: 37,
    messages.PromptLogprobs: 38,
    orders.JoinRanks: 48,
    orders.RunForward: 49,
    orders.RunLogits: 50,
}
_PLAIN_TOKENS = 40  # a tuple of tokens without scores, as their numbers in a row
_CLASSES = {code: cls for cls, code in _CODES.items()}
_ENUMS = (messages.SequenceFinish, Reserve)
_FIELDS = {cls: tuple(f.name for f in fields(cls)) for cls in _CODES if cls not in _ENUMS}
_MESSAGES = get_args(Message)


def encode_frame(message: Message) -> bytes:
    """Return the frame of one message; raises ValueError for one that is too large."""
    body: bytes = msgpack.packb(message, default=_to_ext, strict_types=True)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Turns received bytes into messages, however the stream was cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Take bytes in; return the messages they complete. Raises ValueError for nonsense."""
        self._buffer += data
        decoded, start = [], 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ValueError(
                    f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}"
                )
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            decoded.append(_decode_body(bytes(self._buffer[start + _LENGTH.size : end])))
            start = end
        del self._buffer[:start]
        return decoded


def _decode_body(body: bytes) -> Message:
    value = _unpack(body)
    if not isinstance(value, _MESSAGES):
        raise ValueError(f"a frame holds a {type(value).__name__}, not a message")
    message: Message = value
    return message


def _to_ext(value: Any) -> Any:
    cls = type(value)
    if cls is tuple:
        return _plain_tokens(value) or list(value)
    if cls in _ENUMS:
        return msgpack.ExtType(_CODES[cls], value.value.encode())
    if cls not in _FIELDS:
        raise ValueError(f"a {cls.__name__} does not travel between transport and engine")
    values = [getattr(value, name) for name in _FIELDS[cls]]
    return msgpack.ExtType(_CODES[cls], msgpack.packb(values, default=_to_ext, strict_types=True))


def _plain_tokens(values: tuple[Any, ...]) -> msgpack.ExtType | None:
    """Pack a step's tokens, of which most traffic consists, without a tag for each."""
    row: list[int] = []
    for value in values:
        if type(value) is not messages.SampledToken or value.logprob is not None:
            return None
        row += (value.seq_id, value.token_id)
    return msgpack.ExtType(_PLAIN_TOKENS, msgpack.packb(row)) if row else None


def _from_ext(code: int, data: bytes) -> Any:
    if code == _PLAIN_TOKENS:
        row = _unpack(data)
        return tuple(map(messages.SampledToken, row[::2], row[1::2]))
    cls = _CLASSES.get(code)
    if cls is None:
        raise ValueError(f"unknown tag {code} in a frame")
    if cls in _ENUMS:
        return cls(data.decode())
    values = _unpack(data)
    if not isinstance(values, tuple) or len(values) != len(_FIELDS[cls]):
        raise ValueError(f"wrong number of fields for {cls.__name__}")
    return cls(*values)


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, use_list=False, ext_hook=_from_ext)
    except (msgpack.UnpackException, msgpack.ExtraData) as error:
        raise ValueError("a frame is not valid msgpack") from error
