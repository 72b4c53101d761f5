"""Sampling options: every range has two ends, and whatever lies outside is named."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.packing import pack
from headrace.sampling import MAX_LOGIT_BIAS, MAX_SEED, SamplingParams

ACCEPTED: list[tuple[str, Any]] = [
    ("max_tokens", 1),
    ("max_tokens", None),
    ("temperature", 0),
    ("temperature", 2.5),
    ("top_p", 0.0),
    ("top_p", 1),
    ("top_k", 0),
    ("top_k", 50),
    ("min_p", 1.0),
    ("seed", 0),
    ("seed", MAX_SEED),
    ("n", 128),
    ("logprobs", 0),
    ("logprobs", 20),
    ("presence_penalty", -2),
    ("frequency_penalty", 2.0),
    ("repetition_penalty", 10),
    ("min_tokens", 256),
    ("ignore_eos", True),
    ("stop", "\n\n"),
    ("stop", ["a"] * 16),
    ("stop_token_ids", [0, 2]),
    ("logit_bias", {5: -100, 6: 100.0}),
    ("include_stop", True),
    ("echo", True),
    ("bad_words", None),
    ("bad_words", "lone"),
    ("bad_words", ["x" * 256] * 256),
    ("prompt_logprobs", 0),
    ("prompt_logprobs", 20),
    ("response_format", {"type": "regex", "regex": "[0-9]+"}),
]

REFUSED: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**31),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", "16"),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 10**400),
    ("temperature", True),
    ("temperature", "hot"),
    ("temperature", None),
    ("top_p", -0.01),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", -1.0),
    ("top_k", 1.0),
    ("min_p", 1.5),
    ("min_p", -math.inf),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.0),
    ("n", 0),
    ("n", 129),
    ("n", None),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("presence_penalty", 2.01),
    ("frequency_penalty", -2.01),
    ("repetition_penalty", 0),
    ("repetition_penalty", 10.5),
    ("min_tokens", -1),
    ("ignore_eos", 1),
    ("stop", ""),
    ("stop", [""]),
    ("stop", [b"x"]),
    ("stop", {"a"}),
    ("stop", ["x" * 257]),
    ("stop", ["a"] * 17),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", [0] * 65),
    ("stop_token_ids", 7),
    ("logit_bias", {5: 100.5}),
    ("logit_bias", {5: math.nan}),
    ("logit_bias", {-5: 1.0}),
    ("logit_bias", {"five": 1.0}),
    ("logit_bias", [(5, 1.0)]),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
    ("include_stop", 1),
    ("include_stop", None),
    ("echo", "true"),
    ("bad_words", [""]),
    ("bad_words", [7]),
    ("bad_words", {"a": 1}),
    ("bad_words", ["x" * 257]),
    ("bad_words", ["x"] * 257),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("response_format", "json"),
    ("response_format", {"type": "xml"}),
]

NUMERIC = [
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens"),
    "prompt_logprobs",
]


def is_accepted(name: str, value: Any) -> bool:
    """Whether an option takes a value."""
    try:
        SamplingParams(**{name: value})
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_ends_of_each_range_are_accepted(name: str, value: Any) -> None:
    """A value at the end of its range is taken."""
    SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_values_outside_are_refused_by_name(name: str, value: Any) -> None:
    """A value out of range or of the wrong type raises an error that names the option (B13)."""
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "0.7", True, False, [1], 1j])
@pytest.mark.parametrize("name", NUMERIC)
def test_no_number_is_taken_for_one(name: str, value: Any) -> None:
    """NaN, Infinity, text and booleans are refused in every numeric option, by name (B20)."""
    with pytest.raises(InvalidRequest, match=f"^{name} must be"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, "0.7", True, None])
def test_no_number_is_taken_for_one_in_a_list(value: Any) -> None:
    """Token ids and biases are as strict as the options that hold one number."""
    with pytest.raises(InvalidRequest, match="logit_bias"):
        SamplingParams(logit_bias={5: value})
    with pytest.raises(InvalidRequest, match="logit_bias token id"):
        SamplingParams(logit_bias={value: 1.0})
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        SamplingParams(stop_token_ids=(value,))


@pytest.mark.parametrize("name", NUMERIC)
def test_a_number_too_long_to_print_is_refused_by_name(name: str) -> None:
    """Python prints no integer of so many digits, so the message says what it is instead."""
    for value in (10**5000, [10**5000]):
        with pytest.raises(InvalidRequest, match=f"^{name} must be .* too large to show"):
            SamplingParams(**{name: value})


def test_the_list_of_numeric_options_is_complete() -> None:
    """An option that takes the number 1 is one of those above."""
    names = {f.name for f in dataclasses.fields(SamplingParams)}
    takes = {name for name in names if is_accepted(name, 1)}
    assert takes == set(NUMERIC)


def test_refusal_quotes_the_value() -> None:
    """The message holds the offending value, so that a log line is enough."""
    with pytest.raises(InvalidRequest, match=r"top_p must be in \[0, 1\], not 1\.7"):
        SamplingParams(top_p=1.7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0 and at most 10, not 0.0"),
        ({"temperature": -1}, "temperature must be at least 0, not -1.0"),
        ({"stop_token_ids": 7}, "stop_token_ids must be a list of token ids, not 7"),
        ({"stop_token_ids": "7"}, "stop_token_ids must be a list of token ids, not '7'"),
        ({"stop_token_ids": [-1]}, "each of stop_token_ids must be a whole number in "),
        ({"stop": 7}, "stop must be text or a list of texts, not 7"),
        ({"bad_words": 7}, "bad_words must be text or a list of texts, not 7"),
    ],
)
def test_a_refusal_says_what_would_be_taken(options: dict[str, Any], message: str) -> None:
    """The range and the kind of value are said in words that can be acted on."""
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**options)
    assert caught.value.message.startswith(message)


def test_minus_one_keeps_all_tokens_as_in_vllm() -> None:
    """A top_k of -1 is 0, the same payload, in the client as in a batch line."""
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(top_k=-1).to_wire() == {}


def test_min_tokens_cannot_exceed_max_tokens() -> None:
    """Asking for more tokens than are allowed is a contradiction, and is refused."""
    with pytest.raises(InvalidRequest, match="min_tokens 9 exceeds max_tokens 8"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_spellings_of_other_apis_are_one_value() -> None:
    """A lone stop string, lists, text keys and whole numbers mean the same as the plain forms."""
    loose = SamplingParams(
        stop="\n", stop_token_ids=[3], logit_bias={"9": 1, "5": -1}, temperature=0
    )  # type: ignore[arg-type]
    strict = SamplingParams(
        stop=("\n",), stop_token_ids=(3,), logit_bias={5: -1.0, 9: 1.0}, temperature=0.0
    )
    assert loose == strict
    assert repr(loose.to_wire()) == repr(strict.to_wire())


def test_params_cannot_be_changed() -> None:
    """Options are frozen once they are checked."""
    with pytest.raises(AttributeError):
        SamplingParams().top_p = 3.0  # type: ignore[misc]


def test_only_what_differs_travels() -> None:
    """Options at their defaults stay off the wire."""
    assert SamplingParams().to_wire() == {}
    assert SamplingParams(max_tokens=None, seed=7).to_wire() == {"max_tokens": None, "seed": 7}


@pytest.mark.parametrize("options", [None, [], "x", 3])
def test_options_from_the_wire_must_be_a_map(options: object) -> None:
    """Anything but a map of options is refused."""
    with pytest.raises(InvalidRequest, match="sampling options must be a map"):
        SamplingParams.from_wire(options)


@pytest.mark.parametrize("name", ["best_of", "__class__", 7])
def test_unknown_options_are_refused(name: object) -> None:
    """An option that this version does not know is refused by name, never ignored."""
    with pytest.raises(InvalidRequest, match="unknown sampling option"):
        SamplingParams.from_wire({name: 1})


def test_negative_zero_is_zero() -> None:
    """Options that are equal are one payload, to the last bit."""
    assert pack(SamplingParams(temperature=-0.0).to_wire()) == pack({"temperature": 0.0})
    bias = SamplingParams(logit_bias={5: -0.0, 6: 1}).to_wire()
    assert pack(bias) == pack({"logit_bias": {5: 0.0, 6: 1.0}})


def test_plain_text_as_a_response_format_is_none() -> None:
    """Two ways to ask for no form are one payload."""
    assert SamplingParams(response_format={"type": "text"}).to_wire() == {}
