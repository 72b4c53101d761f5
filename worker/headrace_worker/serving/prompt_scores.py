"""The logprobs of one prompt, collected from the engine's steps until all are there."""

from __future__ import annotations

from headrace.types import TokenLogprob
from headrace_worker.engine.messages import PromptLogprobs, TokenScore


class PromptScores:
    """Touched on the event loop only."""

    def __init__(self) -> None:
        self._logprobs: list[TokenLogprob] = []  # of tokens [1, 1 + len)

    def add(self, part: PromptLogprobs) -> None:
        """Take the next part; what is here already is not taken again."""
        next_place = 1 + len(self._logprobs)
        assert part.start <= next_place, f"scores from {part.start} on, and {next_place} is next"
        self._logprobs += map(_logprob, part.scores[next_place - part.start :])

    def all_of(self, num_prompt_tokens: int) -> tuple[TokenLogprob | None, ...] | None:
        """Return one logprob a token, None for the first; None while some are missing."""
        if 1 + len(self._logprobs) < num_prompt_tokens:
            return None
        return (None, *self._logprobs)


def _logprob(score: TokenScore) -> TokenLogprob:
    return TokenLogprob(score.token_id, score.logprob, score.top_logprobs)
