"""Logprobs on the wire: one flat array a token, of the output or of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.errors import InvalidRequest
from headrace.packing import finite, list_of
from headrace.types import TokenLogprob

MAX_PROMPT_SCORES = 262_144
"""Most (token id, logprob) pairs that a terminal entry carries for its prompt: about 4 MB."""


def check_num_scores(num_prompt_tokens: int, prompt_logprobs: int | None) -> None:
    """Raise InvalidRequest where the prompt's logprobs would be more than one entry carries."""
    if prompt_logprobs is None:
        return
    num_scores = num_prompt_tokens * (prompt_logprobs + 1)
    if num_scores > MAX_PROMPT_SCORES:
        raise InvalidRequest(
            f"prompt_logprobs {prompt_logprobs} over {num_prompt_tokens} prompt tokens are"
            f" {num_scores} values, at most {MAX_PROMPT_SCORES} are taken"
        )


def flat_scores(scores: Sequence[TokenLogprob | None]) -> list[list[int | float] | None]:
    """Return an array a token; None stays None."""
    return [None if score is None else _flat(score) for score in scores]


def read_scores(rows: object) -> tuple[TokenLogprob, ...]:
    """Read one array a token; raises TypeError or ValueError."""
    return tuple(_read(row) for row in list_of(rows, object))


def read_prompt_scores(rows: object) -> tuple[TokenLogprob | None, ...] | None:
    """Read the logprobs of a prompt, whose first token has none; raises TypeError, ValueError."""
    if rows is None:
        return None
    first, *others = list_of(rows, object)
    if first is not None:
        raise ValueError(f"the first prompt token has the logprob {first!r}")
    return (None, *read_scores(others))


def _flat(score: TokenLogprob) -> list[int | float]:
    """Return ``[token id, logprob, first id, its logprob, …]``."""
    pairs = ((score.token_id, score.logprob), *score.top)
    return [number for pair in pairs for number in pair]


def _read(row: Any) -> TokenLogprob:
    numbers = list_of(row, object)
    token_ids = list_of(numbers[0::2], int)
    logprobs = [finite("logprob", number) for number in numbers[1::2]]
    (own, *top) = zip(token_ids, logprobs, strict=True)
    return TokenLogprob(own[0], own[1], tuple(top))
