"""How the next token is chosen: every option, its range, and the check that names what is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from headrace.checks import (
    MAX_INT,
    check_boolean,
    check_integer,
    check_number,
    check_texts,
    check_tuple,
    shown,
)
from headrace.errors import InvalidRequest
from headrace.response_format import normal_response_format

DEFAULT_MAX_TOKENS = 256
MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**64 - 1
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256  # characters

_ALL_TOKENS = -1  # vLLM's word for a top_k that keeps all; ours is 0
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options, validated when they are made.

    Semantics and order are those of vLLM and the OpenAI API: logit bias, penalties, min-tokens
    mask, bad words, response format, temperature, top-k, top-p, min-p; docs/requests.md has it all.
    Raises InvalidRequest that names the option and value.
    """

    max_tokens: int | None = DEFAULT_MAX_TOKENS  # >= 1; None: until the context is full
    temperature: float = 1.0  # >= 0; 0 is greedy
    top_p: float = 1.0  # [0, 1]; 0 is greedy
    top_k: int = 0  # >= 0; 0 keeps all, and -1, which becomes 0
    min_p: float = 0.0  # [0, 1]
    stop: tuple[str, ...] = ()  # the output ends before the first of these strings
    stop_token_ids: tuple[int, ...] = ()  # the output ends at the first of these
    seed: int | None = None  # unsigned 64 bit; None: derived from the request id
    n: int = 1  # answers to one prompt
    logprobs: int | None = None  # 0..20 most likely tokens beside the sampled one
    presence_penalty: float = 0.0  # [-2, 2], over output
    frequency_penalty: float = 0.0  # [-2, 2], over output
    repetition_penalty: float = 1.0  # (0, 10], over prompt and output
    logit_bias: Mapping[int, float] | None = None  # token id → [-100, 100]
    min_tokens: int = 0  # no stop string or token counts before so many
    ignore_eos: bool = False  # go on past end of sequence
    include_stop: bool = False  # the text ends with the stop string or token that ended it
    bad_words: tuple[str, ...] = ()  # texts that the output never holds
    prompt_logprobs: int | None = None  # 0..20 most likely tokens beside each of the prompt
    echo: bool = False  # the text begins with that of the prompt
    response_format: Mapping[str, Any] | None = None  # the form that the answer must have

    def __post_init__(self) -> None:
        _normalise(self)
        _check(self)

    def to_wire(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as plain msgpack types."""
        return {
            f.name: _plain(getattr(self, f.name))
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }

    @classmethod
    def from_wire(cls, options: object) -> SamplingParams:
        """Build from untrusted data; unknown options are refused by name."""
        if not isinstance(options, Mapping):
            raise InvalidRequest(f"sampling options must be a map, not {type(options).__name__}")
        known = {f.name for f in fields(cls)}
        for name in options:
            if name not in known:
                raise InvalidRequest(f"unknown sampling option {shown(name)}")
        return cls(**options)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _normalise(params: SamplingParams) -> None:
    """Accept the spellings that other APIs accept: a lone stop string, lists, string keys."""
    for name in ("stop", "bad_words", "stop_token_ids"):
        value = getattr(params, name)
        is_lone = isinstance(value, str) and name != "stop_token_ids"
        _set(params, name, (value,) if is_lone else _as_tuple(value))
    if type(params.top_k) is int and params.top_k == _ALL_TOKENS:
        _set(params, "top_k", 0)
    _set(params, "response_format", normal_response_format(params.response_format))
    if isinstance(params.logit_bias, Mapping):
        _set(params, "logit_bias", _normal_bias(params.logit_bias))
    # One spelling a value: 0 and 0.0 would otherwise make two payloads of one request.
    for name in ("temperature", "top_p", "min_p", *_PENALTIES):
        _set(params, name, _as_float(getattr(params, name)))


def _normal_bias(bias: Mapping[Any, Any]) -> dict[Any, Any] | None:
    normal = {_token_id(key): _as_float(value) for key, value in bias.items()}
    if all(type(key) is int for key in normal):
        normal = dict(sorted(normal.items()))
    return normal or None


def _as_tuple(value: object) -> object:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else value


def _as_float(value: object) -> object:
    if type(value) is int and abs(value) <= MAX_INT:
        return float(value)
    return value + 0.0 if type(value) is float else value  # -0.0 is 0.0, in other bytes


def _set(params: SamplingParams, name: str, value: object) -> None:
    object.__setattr__(params, name, value)


def _token_id(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key


def _check(params: SamplingParams) -> None:
    if params.max_tokens is not None:
        check_integer("max_tokens", params.max_tokens, 1, MAX_INT)
    check_number("temperature", params.temperature, 0.0, math.inf)
    check_number("top_p", params.top_p, 0.0, 1.0)
    check_integer("top_k", params.top_k, 0, MAX_INT)
    check_number("min_p", params.min_p, 0.0, 1.0)
    if params.seed is not None:
        check_integer("seed", params.seed, 0, MAX_SEED)
    check_integer("n", params.n, 1, MAX_N)
    for name in ("logprobs", "prompt_logprobs"):
        if (wanted := getattr(params, name)) is not None:
            check_integer(name, wanted, 0, MAX_LOGPROBS)
    check_number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    check_number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    check_number("repetition_penalty", params.repetition_penalty, 0.0, 10.0, is_low_open=True)
    check_integer("min_tokens", params.min_tokens, 0, MAX_INT)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"min_tokens {params.min_tokens} exceeds max_tokens {params.max_tokens}"
        )
    for name in ("ignore_eos", "include_stop", "echo"):
        check_boolean(name, getattr(params, name))
    _check_stops(params)
    _check_bias(params.logit_bias)


def _check_stops(params: SamplingParams) -> None:
    texts, ids = "text or a list of texts", "a list of token ids"
    check_texts("stop", params.stop, MAX_STOP_STRINGS, MAX_STOP_LENGTH, texts)
    check_texts("bad_words", params.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH, texts)
    check_tuple("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS, ids)
    for token_id in params.stop_token_ids:
        check_integer("each of stop_token_ids", token_id, 0, MAX_INT)


def _check_bias(bias: object) -> None:
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        raise InvalidRequest(f"logit_bias must map token ids to numbers, not {shown(bias)}")
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias has {len(bias)} entries, at most {MAX_LOGIT_BIAS} are taken"
        )
    for token_id, value in bias.items():
        check_integer("logit_bias token id", token_id, 0, MAX_INT)
        check_number(f"logit_bias[{token_id}]", value, -100.0, 100.0)
