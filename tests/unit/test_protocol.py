"""The messages: their exact bytes, their way there and back, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.checks import MAX_JSON_DEPTH
from headrace.errors import ErrorCode, InvalidRequest, ProtocolError
from headrace.metadata import MAX_METADATA_BYTES
from headrace.packing import MAX_PAYLOAD_BYTES, MAX_PROMPT_TOKENS, pack
from headrace.protocol import (
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
from headrace.scores import MAX_PROMPT_SCORES, check_num_scores
from headrace.types import FinishReason, Timings, TokenLogprob, Usage

_names = st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True)
_json = st.dictionaries(st.text(max_size=9), st.text(max_size=9) | st.integers(0, 99), max_size=4)
_prompts = st.text(min_size=1, max_size=50) | st.lists(
    st.integers(0, 2**31 - 1), min_size=1, max_size=50
).map(tuple)


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
    | st.builds(
        RequestMessage,
        request_id=_names,
        tenant=_names,
        sampling=st.just(SamplingParams(echo=True)),
        messages=st.just(({"role": "user", "content": "Hi"},)),
        tools=st.lists(_json.filter(bool), max_size=3).map(tuple),
        chat_template_kwargs=st.dictionaries(st.sampled_from(["a", "b"]), _json),
    )
)
def test_every_request_comes_back(message: RequestMessage) -> None:
    """Decoding what was encoded gives an equal request."""
    assert decode_request(encode_request(message)) == message


_pairs = st.tuples(st.integers(0, 2**31), st.floats(-50, 0))
_scores = st.builds(lambda own, top: TokenLogprob(*own, tuple(top)), _pairs, st.lists(_pairs))


@given(st.lists(st.tuples(_pairs, st.text(max_size=5), st.lists(_pairs, max_size=3)), min_size=1))
def test_every_chunk_comes_back(tokens: list[Any]) -> None:
    """Decoding what was encoded gives an equal chunk, with its logprobs."""
    message = ChunkMessage(
        tuple(own[0] for own, _, _ in tokens),
        tuple(piece for _, piece, _ in tokens),
        tuple(TokenLogprob(*own, tuple(top)) for own, _, top in tokens),
    )
    assert decode_chunk(encode_chunk(message)) == message


@given(
    st.builds(
        TerminalMessage,
        finish_reason=st.sampled_from(
            sorted(set(FinishReason) - {FinishReason.ERROR, FinishReason.CANCELLED})
        ),
        text=st.text(max_size=9),
        usage=st.builds(Usage, *[st.integers(0, 9999)] * 3),
        timings=st.builds(Timings, *[st.floats(0, 99)] * 4),
        worker_id=st.none() | _names,
        prompt_logprobs=st.none() | st.lists(_scores).map(lambda scores: (None, *scores)),
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
    ({"nice": 1}, ErrorCode.INVALID_REQUEST, "unknown request field 'nice'"),
    ({5: 1}, ErrorCode.INVALID_REQUEST, "unknown request field 5"),
    ({"s": {"nice": 1}}, ErrorCode.INVALID_REQUEST, "unknown sampling option 'nice'"),
    ({"tools": [{"x": 1}]}, ErrorCode.INVALID_REQUEST, "tools needs messages"),
    ({"tmpl": {"x": 1}}, ErrorCode.INVALID_REQUEST, "chat_template_kwargs needs messages"),
    ({"tools": ["f"]}, ErrorCode.INVALID_REQUEST, "tools must hold maps, not 'f'"),
    ({"tmpl": {"tools": 1}}, ErrorCode.INVALID_REQUEST, "must not set 'tools'"),
    ({"tmpl": {"x": math.nan}}, ErrorCode.INVALID_REQUEST, "nan"),
    (
        {"p": [1] * 20_000, "s": {"prompt_logprobs": 20}},
        ErrorCode.INVALID_REQUEST,
        "prompt_logprobs 20 over 20000 prompt tokens are 420000 values",
    ),
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


@pytest.mark.parametrize(
    "change",
    [
        {"v": "x" * 100_000},
        {"id": "x" * 100_000},
        {"t": "x" * 100_000},
        {"p": [1, "x" * 100_000]},
        {"p": None, "m": [{"content": "x" * 100_000}]},
        {"model": [["x" * 100_000]]},
        {"x" * 100_000: 1},
        {"s": {"x" * 100_000: 1}},
    ],
)
def test_a_refusal_quotes_no_huge_value(change: dict[str, Any]) -> None:
    """A worker's refusal travels in the terminal entry, and must not carry the request back."""
    with pytest.raises(InvalidRequest) as caught:
        decode_request(pack(GOOD_REQUEST | change))
    assert len(caught.value.message) < 1000


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
    {"plp": 5},
    {"plp": []},
    {"plp": [[1, -0.5]]},
    {"plp": [None, None]},
    {"plp": [None, [1]]},
    {"plp": [None, [1, math.nan]]},
]


@pytest.mark.parametrize("change", BAD_TERMINALS, ids=repr)
def test_bad_terminal_is_a_protocol_error(change: dict[str, Any]) -> None:
    """A terminal entry with a missing or mistyped part raises ProtocolError."""
    with pytest.raises(ProtocolError, match="unreadable terminal"):
        decode_terminal(pack({"v": VERSION, "reason": "stop"} | change))


@pytest.mark.parametrize("num_top", [4, 20])
def test_logprobs_of_a_long_prompt_fit_the_terminal_entry(num_top: int) -> None:
    """The most logprobs that a request may ask for are written and read again."""
    score = TokenLogprob(2**31 - 1, -0.123, ((2**31 - 1, -0.123),) * num_top)
    num_tokens = MAX_PROMPT_SCORES // (num_top + 1)
    check_num_scores(num_tokens, num_top)
    scores = (None, *[score] * (num_tokens - 1))
    data = encode_terminal(TerminalMessage(FinishReason.STOP, prompt_logprobs=scores))
    back = decode_terminal(data).prompt_logprobs
    assert back is not None
    assert (len(back), back[-1]) == (num_tokens, score)


def test_too_many_logprobs_of_a_prompt_are_refused() -> None:
    """What no terminal entry could carry is refused before it is computed."""
    check_num_scores(10**9, None)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_PROMPT_SCORES}"):
        check_num_scores(MAX_PROMPT_SCORES + 1, 0)


def test_a_schema_as_deep_as_is_taken_travels() -> None:
    """The depth of the option and that of the wire agree."""
    schema: dict[str, Any] = {}
    for _ in range(MAX_JSON_DEPTH - 1):
        schema = {"not": schema}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    message = RequestMessage("r", "t", SamplingParams(response_format=form), prompt="x")
    assert decode_request(encode_request(message)) == message
