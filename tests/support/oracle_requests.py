"""What the requests of a schedule over the oracle are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

POISON = 63  # the token id after which a row is NaN, where a schedule has one
# Prompts begin with some of these, so that they share blocks, or nearly.
STEMS = tuple(tuple((stem * 17 + i * i) % 61 for i in range(40)) for stem in range(3))
SALTS = (b"", b"x")
PRIORITIES = (5, 0, 9)
# What a request may ask for; two of them together make one. Numbers that float32 holds exactly.
WISHES: tuple[Mapping[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 2.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.5, "min_p": 0.125},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.75},
    {"repetition_penalty": 2.0},
    {"logit_bias": ((5, 6.0), (6, 6.0), (7, -6.0))},
    {"bad_words": ((5,), (6, 7), (1, 2, 3), *((token_id, 6) for token_id in range(30)))},
    {"stop_token_ids": tuple(range(8, 16))},
    {"stop_token_ids": tuple(range(8, 40)), "min_tokens": 3},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
)
