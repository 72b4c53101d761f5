"""The ledger: a request enters once, leaves once, and only the queue's word lets it finish."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.errors import ErrorCode, TransportError
from headrace.functions import FinishOutcome, FinishReply, Held
from headrace.protocol import ChunkMessage
from headrace.types import FinishReason, RequestState
from headrace_worker.engine.messages import SampledToken
from headrace_worker.serving.request import (
    CANCELLED,
    DEADLINE_PASSED,
    LENGTH_REACHED,
    STOPPED,
    End,
    Phase,
)
from support.serving_parts import Books, make_grant, make_prepared


@pytest.fixture
def books() -> Books:
    """Give an empty ledger."""
    return Books()


async def finish(books: Books, request_id: str = "r1") -> None:
    """Acknowledge all tokens of a request that has ended, and finish it."""
    request = books.ledger.find("acme", request_id)
    assert request is not None
    request.outbox.settle(request.outbox.num_tokens, books.clock.now)
    await books.ledger.finish(request)


async def test_a_request_passes_through_its_phases(books: Books) -> None:
    """Claimed, waiting, running, ending, finished: and then the ledger is empty."""
    request = books.ledger.claim(make_grant())
    assert request is not None
    phases = [request.phase]
    seq_id = books.ledger.start(request, make_prepared())
    phases.append(request.phase)
    books.ledger.admitted(seq_id, 0)
    phases.append(request.phase)
    books.say(request, 1)
    books.ledger.engine_finished(seq_id, LENGTH_REACHED)
    phases.append(request.phase)
    await finish(books)
    phases.append(request.phase)
    assert phases == [*(Phase.CLAIMED, Phase.WAITING, Phase.RUNNING, Phase.ENDING, Phase.FINISHED)]
    assert len(books.ledger) == 0
    books.ledger.check_integrity()


def test_a_phase_cannot_be_skipped_backwards(books: Books) -> None:
    """An impossible transition is a fault of ours, and is seen at once."""
    request = books.running()
    with pytest.raises(AssertionError, match="running → waiting"):
        request.move_to(Phase.WAITING)


def test_a_grant_told_twice_enters_once(books: Books) -> None:
    """The answer to a repeated claim names grants that are here already."""
    assert books.ledger.claim(make_grant()) is not None
    assert books.ledger.claim(make_grant()) is None
    assert len(books.ledger) == 1


def test_a_newer_grant_replaces_an_older_one(books: Books) -> None:
    """Whoever was taken back and granted to us again goes on under the new epoch only."""
    old = books.running()
    new = books.ledger.claim(make_grant(epoch=2))
    assert new is not None
    assert old.phase is Phase.DROPPED
    assert books.aborted == [old.seq_id]
    assert books.ledger.requests == [new]


def test_the_first_end_stands(books: Books) -> None:
    """A cancel that comes after the end changes nothing."""
    request = books.running()
    books.ledger.end(request, DEADLINE_PASSED)
    books.ledger.end(request, CANCELLED)
    assert request.end is DEADLINE_PASSED


def test_an_end_of_ours_aborts_the_sequence(books: Books) -> None:
    """Cancelled: the engine is told at once, and later tokens of it are nobody's."""
    request = books.running()
    books.ledger.end(request, CANCELLED)
    assert books.aborted == [request.seq_id]
    books.say(request, 1)
    assert request.outbox.num_tokens == 0


def test_an_end_of_the_engines_is_not_aborted(books: Books) -> None:
    """The engine forgets a sequence that it finished by itself."""
    request = books.running()
    assert request.seq_id is not None
    books.ledger.engine_finished(request.seq_id, STOPPED)
    assert books.aborted == []


def test_a_stop_string_ends_the_request(books: Books) -> None:
    """Its text ends before the stop string; tokens that the engine made meanwhile are not taken."""
    request = books.running(stop=("cd",))
    books.say(request, 0, 1, 2, 3, 4, 5)
    assert request.phase is Phase.ENDING
    assert request.end is STOPPED
    assert request.outbox.num_tokens == 4
    assert books.aborted == [request.seq_id]


async def test_text_that_was_held_back_goes_into_the_terminal_entry(books: Books) -> None:
    """The beginning of a stop string that never came is part of the text, once."""
    request = books.running(stop=("bx",))
    books.say(request, 0, 1)
    books.ledger.end(request, LENGTH_REACHED)
    await finish(books)
    assert books.queue.ended["r1"].text == "b"


async def test_a_repeated_finish_publishes_the_same_entry(books: Books) -> None:
    """The reply was lost: the second try carries the same tail and the same times."""
    request = books.running(stop=("bx",))
    books.say(request, 0, 1)
    books.ledger.end(request, LENGTH_REACHED)
    books.queue.loses_replies = True
    with pytest.raises(TransportError):
        await finish(books)
    first = books.queue.ended.pop("r1")
    books.queue.loses_replies = False
    books.clock.advance(5)
    await finish(books)
    assert books.queue.ended["r1"] == first
    assert request.phase is Phase.FINISHED


async def test_the_terminal_entry_holds_usage_and_times(books: Books) -> None:
    """Enqueued 2 s before the claim; admitted 1 s after it, three tokens from 2 s on, 1 s apart."""
    request = books.ledger.claim(make_grant())
    assert request is not None
    seq_id = books.ledger.start(request, make_prepared())
    books.clock.advance(1)
    books.ledger.admitted(seq_id, 2)
    for token_id in range(3):
        books.clock.advance(1)
        books.say(request, token_id)
    books.ledger.engine_finished(seq_id, LENGTH_REACHED)
    await finish(books)
    end = books.queue.ended["r1"]
    assert end.usage is not None
    assert end.timings is not None
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (3, 3)
    assert end.usage.cached_tokens == 2
    assert (end.timings.queue_s, end.timings.ttft_s) == (3.0, 4.0)
    assert (end.timings.tpot_s, end.timings.e2e_s) == (1.0, 6.0)
    assert end.worker_id == "w1"


async def test_after_a_takeover_nobody_knows_the_time_to_first_token(books: Books) -> None:
    """The first token was another worker's; the mean time per token is of our own tokens."""
    request = books.ledger.claim(make_grant(epoch=2, num_tokens=2))
    assert request is not None
    books.ledger.inherit(request, [ChunkMessage((0, 1), ("a", "b"))])
    seq_id = books.ledger.start(request, make_prepared(emitted=(0, 1)))
    books.ledger.admitted(seq_id, 0)
    books.say(request, 2)
    books.clock.advance(1)
    books.say(request, 3)
    books.ledger.engine_finished(seq_id, LENGTH_REACHED)
    timings = request.timings()
    assert (timings.ttft_s, timings.tpot_s) == (None, 1.0)
    assert request.usage.completion_tokens == 4


async def test_a_refused_request_ends_at_the_offset_of_its_grant(books: Books) -> None:
    """Whatever earlier epochs emitted stays, although it was never read here."""
    request = books.ledger.claim(make_grant(epoch=2, num_tokens=7))
    assert request is not None
    books.ledger.end(request, End.failed(ErrorCode.LOST, "gone"))
    await finish(books)
    assert books.queue.finishes == [(Held("acme", "r1", 2), 7, RequestState.FAILED)]
    end = books.queue.ended["r1"]
    assert (end.finish_reason, end.error_code) == (FinishReason.ERROR, ErrorCode.LOST)


@pytest.mark.parametrize("outcome", [FinishOutcome.FENCED, FinishOutcome.DONE, FinishOutcome.GONE])
async def test_a_refused_finish_drops_the_request(books: Books, outcome: FinishOutcome) -> None:
    """It is no longer ours, so nothing more is written for it."""
    request = books.running()
    books.ledger.end(request, STOPPED)
    books.queue.finish_script = [FinishReply(outcome, 0)]
    await finish(books)
    assert request.phase is Phase.DROPPED
    assert len(books.ledger) == 0


async def test_a_finish_behind_a_gap_sends_the_tokens_again(books: Books) -> None:
    """Redis lost its last second: the request stays, with its tokens unacknowledged."""
    request = books.running()
    books.say(request, 0, 1, 2)
    books.ledger.end(request, LENGTH_REACHED)
    books.queue.finish_script = [FinishReply(FinishOutcome.GAP, 1)]
    await finish(books)
    assert request.phase is Phase.ENDING
    assert request.outbox.num_acknowledged == 1


async def test_released_requests_are_handed_back_and_aborted(books: Books) -> None:
    """The queue hears of all of them in one call, with the strike or without."""
    requests = [books.running("r1"), books.running("r2")]
    await books.ledger.release(requests, strike=True)
    assert books.queue.released == [((requests[0].held, requests[1].held), True)]
    assert books.aborted == [1, 2]
    assert len(books.ledger) == 0


async def test_the_books_are_closed_even_when_the_queue_cannot_hear_it(books: Books) -> None:
    """Nobody renews what was released, so its lease brings it back."""
    request = books.running()
    books.queue.is_down = True
    with pytest.raises(TransportError):
        await books.ledger.release([request], strike=False)
    assert books.ledger.requests == []


def test_a_deadline_is_translated_from_redis_s_clock(books: Books) -> None:
    """Three seconds after Redis's now is three seconds after ours, whatever the worker's clock."""
    request = books.ledger.claim(make_grant(deadline_ms=1_005_000))
    assert request is not None
    assert request.deadline_at == books.clock.now + 3
    undated = books.ledger.claim(make_grant("r2"))
    assert undated is not None
    assert undated.deadline_at is None


def test_unacknowledged_tokens_are_counted_over_all_requests(books: Books) -> None:
    """The count is what would be lost with this process."""
    first, second = books.running("r1"), books.running("r2")
    books.say(first, 0, 1)
    books.say(second, 0)
    first.outbox.settle(1, books.clock.now)
    assert books.ledger.num_unacknowledged == 2


def test_a_preemption_is_counted(books: Books) -> None:
    """Each time the engine computes a request again, its line at the end says so."""
    request = books.running()
    assert request.seq_id is not None
    books.ledger.preempted(request.seq_id)
    books.ledger.preempted(request.seq_id)
    assert request.num_preemptions == 2


def test_news_of_forgotten_sequences_is_ignored(books: Books) -> None:
    """A step that was under way when we dropped a request still speaks of it."""
    books.ledger.admitted(99, 0)
    books.ledger.preempted(99)
    books.ledger.record(SampledToken(99, 1))
    books.ledger.engine_finished(99, STOPPED)
    assert len(books.ledger) == 0


def test_a_request_whose_lease_is_gone_is_dropped(books: Books) -> None:
    """Only the hold that was lost: a newer grant of the same request stays."""
    request = books.running(epoch=2)
    books.ledger.lease_lost(replace(request.held, epoch=1))
    assert request.phase is Phase.RUNNING
    books.ledger.lease_lost(request.held)
    assert request.phase is Phase.DROPPED


async def test_a_finish_under_way_is_not_counted_as_a_lost_lease(books: Books) -> None:
    """The queue forgets the lease with the finish, and a renewal may hear of it first."""
    request = books.running()
    books.ledger.end(request, STOPPED)
    books.ledger.lease_lost(request.held)
    await books.ledger.finish(request)
    assert request.phase is Phase.FINISHED
