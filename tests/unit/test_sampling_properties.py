"""Sampling options on the wire: whatever the values, they are refused by name or come back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.packing import pack, unpack
from headrace.sampling import MAX_SEED, SamplingParams

_words = st.lists(st.text(min_size=1, max_size=9), max_size=4)
_penalties = st.floats(-2, 2)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
_forms = st.one_of(
    st.none(),
    st.just({"type": "json_object"}),
    st.builds(
        lambda schema: {"type": "json_schema", "json_schema": {"schema": schema}},
        st.dictionaries(st.text(max_size=5), _json, max_size=4),
    ),
    st.builds(lambda regex: {"type": "regex", "regex": regex}, st.text(min_size=1)),
    st.builds(
        lambda choice: {"type": "choice", "choice": choice},
        st.lists(st.text(min_size=1), min_size=1, max_size=5),
    ),
)
GOOD = {
    "max_tokens": st.none() | st.integers(64, 2**31 - 1),
    "temperature": st.floats(0, 5),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(0, 1000),
    "min_p": st.floats(0, 1),
    "stop": _words,
    "stop_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=4),
    "seed": st.none() | st.integers(0, MAX_SEED),
    "n": st.integers(1, 128),
    "logprobs": st.none() | st.integers(0, 20),
    "presence_penalty": _penalties,
    "frequency_penalty": _penalties,
    "repetition_penalty": st.floats(0.1, 10),
    "logit_bias": st.none() | st.dictionaries(st.integers(0, 9), st.floats(-100, 100)),
    "min_tokens": st.integers(0, 64),
    "ignore_eos": st.booleans(),
    "include_stop": st.booleans(),
    "bad_words": _words,
    "prompt_logprobs": st.none() | st.integers(0, 20),
    "echo": st.booleans(),
    "response_format": _forms,
}
"""What is taken, for every option there is."""


def test_the_properties_below_know_every_option() -> None:
    """A new option cannot be forgotten."""
    assert set(GOOD) == {f.name for f in dataclasses.fields(SamplingParams)}


def through_the_wire(options: object) -> object:
    """Return options as a worker reads them."""
    return unpack(pack(options))


@given(st.fixed_dictionaries({}, optional=GOOD))
def test_wire_keeps_every_option(options: dict[str, Any]) -> None:
    """Options come back from the wire as they went, and would go again in the same bytes."""
    params = SamplingParams(**options)
    back = SamplingParams.from_wire(through_the_wire(params.to_wire()))
    assert back == params
    assert pack(back.to_wire()) == pack(params.to_wire())


_junk = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, -1, 2**63, 10**400, "0.7", "", b"x", 1j]),
    st.booleans() | st.none() | _json | st.floats() | st.sets(st.integers(), max_size=2),
    st.dictionaries(st.integers() | st.text() | st.booleans(), _json | st.floats(), max_size=3),
)


def refusal_of(options: dict[str, Any]) -> str | None:
    """Return why options are refused, None where they travel and come back as they went."""
    try:
        params = SamplingParams.from_wire(options)
    except InvalidRequest as refusal:
        return refusal.message
    assert SamplingParams.from_wire(through_the_wire(params.to_wire())) == params
    return None


@given(st.sampled_from(sorted(GOOD)), _junk)
def test_what_is_refused_never_travels(name: str, value: Any) -> None:
    """Any value of any option is refused by the option's name, or comes back as it went."""
    refusal = refusal_of({name: value})
    assert refusal is None or name in refusal
