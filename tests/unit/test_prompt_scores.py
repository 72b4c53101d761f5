"""The logprobs of a prompt are complete and in order, however they arrive."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.types import TokenLogprob
from headrace_worker.engine.messages import PromptLogprobs, TokenScore
from headrace_worker.serving.prompt_scores import PromptScores

NUM_TOKENS = 6
EXPECTED = (None, *(TokenLogprob(place, -float(place), ((7, -0.5),)) for place in range(1, 6)))


def _part(start: int, end: int) -> PromptLogprobs:
    """Return the scores of places [start, end)."""
    scores = tuple(TokenScore(place, -float(place), ((7, -0.5),)) for place in range(start, end))
    return PromptLogprobs(seq_id=1, start=start, scores=scores)


@given(st.sets(st.integers(min_value=2, max_value=5)))
def test_parts_make_a_whole(cuts: set[int]) -> None:
    """However a prompt is cut into chunks, each token has its logprob, and the first has none."""
    scores, places = PromptScores(), [1, *sorted(cuts), NUM_TOKENS]
    for start, end in pairwise(places):
        assert scores.all_of(NUM_TOKENS) is None
        scores.add(_part(start, end))
    assert scores.all_of(NUM_TOKENS) == EXPECTED


def test_what_is_told_again_is_not_taken_again() -> None:
    """A prompt that is computed a second time adds only what is new."""
    scores = PromptScores()
    for start, end in ((1, 4), (1, 3), (2, 6)):
        scores.add(_part(start, end))
    assert scores.all_of(NUM_TOKENS) == EXPECTED


def test_a_prompt_of_one_token_has_no_logprobs_to_wait_for() -> None:
    """Nothing predicts the first token."""
    assert PromptScores().all_of(1) == (None,)


def test_a_part_that_leaves_a_gap_is_a_fault_of_ours() -> None:
    """It would give tokens the logprobs of others."""
    with pytest.raises(AssertionError, match="from 2 on, and 1 is next"):
        PromptScores().add(_part(2, 3))
