"""Logprobs in the shapes of the OpenAI API and of vLLM, tokens named by their ids.

The text of a token is the tokenizer's, and no tokenizer runs here. So there is no ``text_offset``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.cli.batch_body import BatchBody
from headrace.types import Completion, TokenLogprob


def chat_logprobs(completion: Completion) -> dict[str, Any] | None:
    """Return the logprobs of a chat answer; None where none were asked for."""
    if completion.logprobs is None:
        return None
    return {"content": [_content(token) for token in completion.logprobs], "refusal": None}


def completion_logprobs(completion: Completion, body: BatchBody) -> dict[str, Any] | None:
    """Return the logprobs of a completion, those of an echoed prompt before them.

    The first token of a prompt has no logprob, and where the prompt was text it has no name,
    either: both are null.
    """
    echoed = completion.prompt_logprobs if body.sampling.echo else None
    if completion.logprobs is None and (echoed is None or body.sampling.logprobs is None):
        return None
    tokens = [*(echoed or ()), *(completion.logprobs or ())]
    shape: dict[str, Any] = {
        "tokens": [None if token is None else _name(token.token_id) for token in tokens],
        "token_logprobs": [None if token is None else token.logprob for token in tokens],
        "top_logprobs": [None if token is None else _named(token.top) for token in tokens],
    }
    if echoed is not None and isinstance(body.prompt, list):
        shape["tokens"][0] = _name(body.prompt[0])
    return shape


def prompt_logprobs(scores: Iterable[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    """Return the logprobs of a prompt as vLLM lists them: a map from token ids for each token.

    The rank of a token beyond the most likely ones that were asked for is not known: null.
    """
    return [None if score is None else _ranked(score) for score in scores]


def _content(token: TokenLogprob) -> dict[str, Any]:
    top = [_entry(token_id, logprob) for token_id, logprob in token.top]
    return {**_entry(token.token_id, token.logprob), "top_logprobs": top}


def _entry(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": _name(token_id), "logprob": logprob, "bytes": None}


def _ranked(score: TokenLogprob) -> dict[str, Any]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(score.top, start=1)}
    return {
        str(token_id): {
            "logprob": logprob,
            "rank": ranks.get(token_id),
            "decoded_token": None,
        }
        for token_id, logprob in ((score.token_id, score.logprob), *score.top)
    }


def _named(pairs: Iterable[tuple[int, float]]) -> dict[str, float]:
    return {_name(token_id): logprob for token_id, logprob in pairs}


def _name(token_id: int) -> str:
    return f"token_id:{token_id}"
