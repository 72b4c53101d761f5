"""The logprobs of a prompt are complete and in order, however they arrive."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ErrorCode
from headrace.protocol import TerminalMessage
from headrace.types import FinishReason, TokenLogprob
from headrace_worker.engine.messages import PromptLogprobs, TokenScore
from headrace_worker.serving.prompt_scores import PromptScores
from headrace_worker.serving.request import CANCELLED, LENGTH_REACHED, STOPPED, InFlight
from support.serving_parts import Books

NUM_TOKENS = 6
EXPECTED = (None, *(TokenLogprob(place, -float(place), ((7, -0.5),)) for place in range(1, 6)))


@pytest.fixture
def books() -> Books:
    """Give an empty ledger."""
    return Books()


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


async def _finish(books: Books, request: InFlight) -> TerminalMessage:
    request.outbox.settle(request.outbox.num_tokens, books.clock.now)
    await books.ledger.finish(request)
    return books.queue.ended["r1"]


async def test_the_terminal_entry_carries_them(books: Books) -> None:
    """One a token of the prompt, whatever was preempted meanwhile."""
    request = books.running(prompt_logprobs=1)
    assert request.seq_id == 1
    books.ledger.score_prompt(_part(1, 2))
    books.ledger.preempted(1)
    books.ledger.score_prompt(_part(2, 3))
    books.say(request, 4)
    books.ledger.engine_finished(1, LENGTH_REACHED)
    assert (await _finish(books, request)).prompt_logprobs == EXPECTED[:3]


async def test_nobody_who_did_not_ask_gets_any(books: Books) -> None:
    """Without the option the entry is as it always was."""
    request = books.running()
    books.ledger.engine_finished(1, STOPPED)
    assert (await _finish(books, request)).prompt_logprobs is None


async def test_a_stop_string_in_the_first_token_comes_behind_them(books: Books) -> None:
    """The step that ends a prompt tells its scores and the first token at once."""
    request = books.running(prompt_logprobs=0, stop=("a",))
    books.ledger.score_prompt(_part(1, 3))
    books.say(request, 0)
    end = await _finish(books, request)
    assert (end.finish_reason, end.prompt_logprobs) == (FinishReason.STOP, EXPECTED[:3])


async def test_an_answer_never_passes_for_complete_without_them(books: Books) -> None:
    """An engine that leaves some out has failed the request, which may be tried again."""
    request = books.running(prompt_logprobs=0)
    books.ledger.score_prompt(_part(1, 2))
    books.ledger.engine_finished(1, STOPPED)
    end = await _finish(books, request)
    assert (end.error_code, end.prompt_logprobs) == (ErrorCode.ENGINE_FAILURE, None)
    assert "logprobs" in end.error_message


async def test_a_cancelled_request_needs_none(books: Books) -> None:
    """Its own end stands, and what is there of its scores is dropped."""
    request = books.running(prompt_logprobs=0)
    books.ledger.end(request, CANCELLED)
    end = await _finish(books, request)
    assert (end.error_code, end.prompt_logprobs) == (ErrorCode.CANCELLED, None)


def test_scores_of_a_forgotten_request_are_ignored(books: Books) -> None:
    """A step that was under way when it was dropped still speaks of it."""
    books.ledger.score_prompt(_part(3, 5))
    assert len(books.ledger) == 0
