"""A request that ends before its time ends with what there is, and that is an answer."""

from __future__ import annotations

import pytest

from headrace.types import FinishReason, RequestState
from headrace_worker.serving.request import DEADLINE_PASSED, STOPPED_EARLY, End, Phase
from support.serving_parts import Books, make_grant

EARLY = pytest.mark.parametrize("end", [DEADLINE_PASSED, STOPPED_EARLY])


@pytest.fixture
def books() -> Books:
    """Give an empty ledger."""
    return Books()


@EARLY
async def test_text_that_was_held_back_comes_with_an_early_end(books: Books, end: End) -> None:
    """The beginning of a stop string was no stop string after all."""
    request = books.running(stop=("bcd",))
    books.say(request, 0, 1, 2)
    books.ledger.end(request, end)
    request.outbox.settle(3, books.clock.now)
    await books.ledger.finish(request)
    terminal = books.queue.ended["r1"]
    assert (terminal.text, terminal.finish_reason) == ("bc", end.reason)
    assert terminal.error_code is None
    assert books.queue.finishes == [(request.held, 3, RequestState.FINISHED)]


@EARLY
def test_an_early_end_owes_no_logprobs_of_the_prompt(books: Books, end: End) -> None:
    """The prompt was not read to its end, and that is no fault of the engine."""
    request = books.running(prompt_logprobs=1)
    books.ledger.end(request, end)
    assert request.end is end
    assert request.prompt_logprobs is None


def test_what_is_past_its_deadline_ends_and_leaves_the_engine(books: Books) -> None:
    """At the deadline, not before, and its blocks are free in the next step."""
    request = books.running(deadline_ms=1_005_000)
    other = books.running("r2")
    books.clock.advance(2.9)
    assert not books.ledger.end_overdue()
    books.clock.advance(0.1)
    assert books.ledger.end_overdue()
    assert (request.phase, other.phase) == (Phase.ENDING, Phase.RUNNING)
    assert books.aborted == [request.seq_id]
    assert not books.ledger.end_overdue()


def test_a_deadline_holds_before_the_prompt_was_read(books: Books) -> None:
    """What waits for its turn in this worker ends in the same way, without text."""
    request = books.ledger.claim(make_grant(deadline_ms=1_003_000))
    assert request is not None
    books.clock.advance(1.0)
    assert books.ledger.end_overdue()
    assert request.end is not None
    assert request.end.reason is FinishReason.DEADLINE
    assert request.tail == ""


def test_an_end_that_came_first_stands_at_the_deadline(books: Books) -> None:
    """A request that was cancelled, or has stopped, does not change its mind."""
    request = books.running(deadline_ms=1_003_000)
    books.ledger.end(request, STOPPED_EARLY)
    books.clock.advance(5.0)
    assert not books.ledger.end_overdue()
    assert request.end is STOPPED_EARLY
