"""The messages: their exact bytes, their way there and back, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import ErrorCode, InvalidRequest, ProtocolError
from headrace.packing import MAX_PAYLOAD_BYTES, MAX_PROMPT_TOKENS, pack
from headrace.protocol import (
    MAX_METADATA_BYTES,
    VERSION,
    ChunkMessage,
    RequestMessage,
    TerminalMessage,
    decode_chunk,
    decode_request,
    decode_terminal,
    encode_chunk,
    encode_request,
    encode_terminal,
)
from headrace.sampling import SamplingParams
from headrace.types import FinishReason, Timings, TokenLogprob, Usage

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Other processes may have the machine: slowness is no failure."""

# Bytes that released clients and workers exchange. A change here is a new protocol version.
GOLDEN_REQUESTS = {
    "TEXT": RequestMessage("order-42", "acme", SamplingParams(seed=7), prompt="Hi"),
    "IDS": RequestMessage("r", "default", SamplingParams(), prompt=(1, 300, 70000)),
    "CHAT": RequestMessage(
        "r/1",
        "default",
        SamplingParams(
            max_tokens=None,
            temperature=0.5,
            stop=("\n",),
            stop_token_ids=(2,),
            logit_bias={5: -100.0},
            ignore_eos=True,
        ),
        messages=({"role": "user", "content": "Grüß dich"},),
        model="smollm2",
        metadata={"trace": "t1"},
    ),
}
GOLDEN_CHUNKS = {
    "PLAIN": ChunkMessage((10, 49151), ("", "é")),
    "LOGPROBS": ChunkMessage((5,), ("a",), (TokenLogprob(5, -0.5, ((5, -0.5), (9, -1.25))),)),
}
GOLDEN_TERMINALS = {
    "STOP": TerminalMessage(
        FinishReason.STOP,
        text="!",
        usage=Usage(3, 2, 1),
        timings=Timings(0.25, 0.5, None, 1.0),
        worker_id="w1",
    ),
    "ERROR": TerminalMessage(
        FinishReason.ERROR, error_code=ErrorCode.UNKNOWN_MODEL, error_message="no 'x'"
    ),
    "CANCELLED": TerminalMessage(FinishReason.CANCELLED, error_code=ErrorCode.CANCELLED),
}
HEX = {
    "TEXT": "85a17601a26964a86f726465722d3432a174a461636d65a170a24869a17381a47365656407",
    "IDS": "84a17601a26964a172a174a764656661756c74a1709301cd012cce00011170",
    "CHAT": (
        "87a17601a26964a3722f31a174a764656661756c74a16d9182a4726f6c65a475736572a7636f6e74"
        "656e74ab4772c3bcc39f2064696368a17386aa6d61785f746f6b656e73c0ab74656d706572617475"
        "7265cb3fe0000000000000a473746f7091a10aae73746f705f746f6b656e5f6964739102aa6c6f67"
        "69745f626961738105cbc059000000000000aa69676e6f72655f656f73c3a56d6f64656ca7736d6f"
        "6c6c6d32a46d65746181a57472616365a27431"
    ),
    "PLAIN": "92920acdbfff92a0a2c3a9",
    "LOGPROBS": "93910591a161919605cbbfe000000000000005cbbfe000000000000009cbbff4000000000000",
    "STOP": (
        "86a17601a6726561736f6ea473746f70a474657874a121a5757361676593030201a574696d657394"
        "cb3fd0000000000000cb3fe0000000000000c0cb3ff0000000000000a6776f726b6572a27731"
    ),
    "ERROR": (
        "84a17601a6726561736f6ea56572726f72a4636f6465ad756e6b6e6f776e5f6d6f64656ca5657272"
        "6f72a66e6f20277827"
    ),
    "CANCELLED": (
        "84a17601a6726561736f6ea963616e63656c6c6564a4636f6465a963616e63656c6c6564a56572726f72a0"
    ),
}


@pytest.mark.parametrize("name", GOLDEN_REQUESTS)
def test_request_has_its_golden_bytes(name: str) -> None:
    """A request is encoded to, and decoded from, exactly the committed bytes."""
    message = GOLDEN_REQUESTS[name]
    assert encode_request(message).hex() == HEX[name]
    assert decode_request(bytes.fromhex(HEX[name])) == message


@pytest.mark.parametrize("name", GOLDEN_CHUNKS)
def test_chunk_has_its_golden_bytes(name: str) -> None:
    """A chunk is encoded to, and decoded from, exactly the committed bytes."""
    message = GOLDEN_CHUNKS[name]
    assert encode_chunk(message).hex() == HEX[name]
    assert decode_chunk(bytes.fromhex(HEX[name])) == message


@pytest.mark.parametrize("name", GOLDEN_TERMINALS)
def test_terminal_has_its_golden_bytes(name: str) -> None:
    """A terminal entry is encoded to, and decoded from, exactly the committed bytes."""
    message = GOLDEN_TERMINALS[name]
    assert encode_terminal(message).hex() == HEX[name]
    assert decode_terminal(bytes.fromhex(HEX[name])) == message


_names = st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True)
_json = st.dictionaries(st.text(max_size=9), st.text(max_size=9) | st.integers(0, 99), max_size=4)
_prompts = st.text(min_size=1, max_size=50) | st.lists(
    st.integers(0, 2**31 - 1), min_size=1, max_size=50
).map(tuple)


@PATIENT
@given(
    st.builds(
        RequestMessage,
        request_id=_names,
        tenant=_names,
        sampling=st.builds(SamplingParams, seed=st.integers(0, 2**64 - 1)),
        prompt=_prompts,
        model=st.none() | st.text(max_size=9),
        metadata=_json,
    )
)
def test_every_request_comes_back(message: RequestMessage) -> None:
    """Decoding what was encoded gives an equal request."""
    assert decode_request(encode_request(message)) == message


_pairs = st.tuples(st.integers(0, 2**31), st.floats(-50, 0))


@PATIENT
@given(st.lists(st.tuples(_pairs, st.text(max_size=5), st.lists(_pairs, max_size=3)), min_size=1))
def test_every_chunk_comes_back(tokens: list[Any]) -> None:
    """Decoding what was encoded gives an equal chunk, with its logprobs."""
    message = ChunkMessage(
        tuple(own[0] for own, _, _ in tokens),
        tuple(piece for _, piece, _ in tokens),
        tuple(TokenLogprob(*own, tuple(top)) for own, _, top in tokens),
    )
    assert decode_chunk(encode_chunk(message)) == message


@PATIENT
@given(
    st.builds(
        TerminalMessage,
        finish_reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
        text=st.text(max_size=9),
        usage=st.builds(Usage, *[st.integers(0, 9999)] * 3),
        timings=st.builds(Timings, *[st.floats(0, 99)] * 4),
        worker_id=st.none() | _names,
    )
)
def test_every_terminal_comes_back(message: TerminalMessage) -> None:
    """Decoding what was encoded gives an equal terminal entry."""
    assert decode_terminal(encode_terminal(message)) == message


GOOD_REQUEST = {"v": VERSION, "id": "r", "t": "default", "p": "Hi"}

BAD_REQUESTS: list[tuple[dict[str, Any], ErrorCode, str]] = [
    ({"v": 2}, ErrorCode.UNSUPPORTED_VERSION, "version 2 is not 1"),
    ({"v": None}, ErrorCode.UNSUPPORTED_VERSION, "None"),
    ({"v": True}, ErrorCode.UNSUPPORTED_VERSION, "True"),
    ({"id": ""}, ErrorCode.INVALID_REQUEST, "request_id ''"),
    ({"id": "a b"}, ErrorCode.INVALID_REQUEST, "'a b'"),
    ({"id": 7}, ErrorCode.INVALID_REQUEST, "7"),
    ({"t": "{x}"}, ErrorCode.INVALID_REQUEST, "{x}"),
    ({"p": ""}, ErrorCode.INVALID_REQUEST, "prompt is empty"),
    ({"p": []}, ErrorCode.INVALID_REQUEST, "prompt is empty"),
    ({"p": None}, ErrorCode.INVALID_REQUEST, "neither"),
    ({"m": [{"role": "user"}]}, ErrorCode.INVALID_REQUEST, "both"),
    ({"p": 5}, ErrorCode.INVALID_REQUEST, "int"),
    ({"p": b"raw"}, ErrorCode.INVALID_REQUEST, "bytes"),
    ({"p": [1, -1]}, ErrorCode.INVALID_REQUEST, "-1"),
    ({"p": [1, True]}, ErrorCode.INVALID_REQUEST, "True"),
    ({"p": [1.5]}, ErrorCode.INVALID_REQUEST, "1.5"),
    ({"p": None, "m": []}, ErrorCode.INVALID_REQUEST, "messages is empty"),
    ({"p": None, "m": "Hi"}, ErrorCode.INVALID_REQUEST, "messages must be a list"),
    ({"p": None, "m": ["Hi"]}, ErrorCode.INVALID_REQUEST, "'Hi'"),
    ({"p": None, "m": [{"content": "x"}]}, ErrorCode.INVALID_REQUEST, "role"),
    ({"s": {"temperature": math.nan}}, ErrorCode.INVALID_REQUEST, "nan"),
    ({"s": {"temperature": math.inf}}, ErrorCode.INVALID_REQUEST, "inf"),
    ({"s": {"max_tokens": True}}, ErrorCode.INVALID_REQUEST, "max_tokens"),
    ({"s": {"n": 2}}, ErrorCode.INVALID_REQUEST, "n 2"),
    ({"s": []}, ErrorCode.INVALID_REQUEST, "map"),
    ({"model": 5}, ErrorCode.INVALID_REQUEST, "model"),
    ({"meta": [1]}, ErrorCode.INVALID_REQUEST, "metadata"),
    ({"meta": {5: 1}}, ErrorCode.INVALID_REQUEST, "5"),
    ({"meta": {"x": "y" * MAX_METADATA_BYTES}}, ErrorCode.INVALID_REQUEST, "metadata has"),
]


@pytest.mark.parametrize(("change", "code", "named"), BAD_REQUESTS)
def test_bad_request_is_refused_by_name(
    change: dict[str, Any], code: ErrorCode, named: str
) -> None:
    """A request with one bad field raises InvalidRequest with its code and the value at fault."""
    with pytest.raises(InvalidRequest) as caught:
        decode_request(pack(GOOD_REQUEST | change))
    assert caught.value.code is code
    assert named in caught.value.message


def test_good_request_is_good() -> None:
    """The request that the bad ones are made from is itself accepted."""
    assert decode_request(pack(GOOD_REQUEST)).prompt == "Hi"


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("x" * MAX_PAYLOAD_BYTES, f"at most {MAX_PAYLOAD_BYTES}"),
        ("\ud800", "surrogates not allowed"),
        ((2**64,), "cannot be encoded"),
    ],
)
def test_request_that_cannot_travel_is_refused(prompt: Any, named: str) -> None:
    """A request that is too large, or holds what msgpack cannot carry, is an InvalidRequest."""
    with pytest.raises(InvalidRequest, match=named):
        encode_request(RequestMessage("r", "t", SamplingParams(), prompt=prompt))


def test_prompt_with_too_many_tokens_is_refused() -> None:
    """A prompt one token longer than the limit is refused on both sides of the wire."""
    message = RequestMessage("r", "t", SamplingParams(), prompt=(1,) * (MAX_PROMPT_TOKENS + 1))
    with pytest.raises(InvalidRequest):
        decode_request(encode_request(message))


BAD_CHUNKS = [
    None,
    {},
    [],
    [[1]],
    [[], []],
    [[1], ["a", "b"]],
    [["1"], ["a"]],
    [[True], ["a"]],
    [[1], [None]],
    [[1], ["a"], []],
    [[1], ["a"], [[]]],
    [[1], ["a"], [[1]]],
    [[1], ["a"], [[1, math.nan]]],
    [[1], ["a"], [[1, -0.5, 2]]],
    [[1], ["a"], [["x", -0.5]]],
    [[1], ["a"], [[1, True]]],
    [[1], ["a"], [[1, -0.5]], []],
]


@pytest.mark.parametrize("body", BAD_CHUNKS, ids=repr)
def test_bad_chunk_is_a_protocol_error(body: object) -> None:
    """A chunk with a missing, surplus or mistyped part raises ProtocolError."""
    with pytest.raises(ProtocolError, match="unreadable chunk"):
        decode_chunk(pack(body))


BAD_TERMINALS: list[dict[str, Any]] = [
    {"v": 2},
    {"v": True},
    {"reason": "bored"},
    {"reason": None},
    {"reason": "error"},
    {"reason": "cancelled"},
    {"code": "cancelled"},
    {"reason": "error", "code": "what"},
    {"text": 5},
    {"usage": [1, 2]},
    {"usage": [1, 2, -3]},
    {"usage": [1, 2, True]},
    {"usage": [1, 2, 3.0]},
    {"times": [1, 2]},
    {"times": [math.nan, None, None, 1]},
    {"times": [None, None, None, 1]},
    {"worker": 5},
    {"reason": "error", "code": "lost", "error": 5},
]


@pytest.mark.parametrize("change", BAD_TERMINALS, ids=repr)
def test_bad_terminal_is_a_protocol_error(change: dict[str, Any]) -> None:
    """A terminal entry with a missing or mistyped part raises ProtocolError."""
    with pytest.raises(ProtocolError, match="unreadable terminal"):
        decode_terminal(pack({"v": VERSION, "reason": "stop"} | change))
