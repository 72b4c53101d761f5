"""The publisher: batches what is due, repeats what failed, and drops what is no longer ours."""

from __future__ import annotations

import asyncio

import pytest

from headrace.errors import TransportError
from headrace.functions import EmitOutcome
from headrace_worker.backoff import Backoff
from headrace_worker.serving.pressure import Pressure
from headrace_worker.serving.publisher import FINISHES_AT_A_TIME, Publisher
from headrace_worker.serving.request import LENGTH_REACHED, Phase
from support.serving_parts import Books
from support.waiting import PATIENCE_S, eventually_async


class Press:
    """A publisher over a scripted queue."""

    def __init__(self, *, most_unsent: int = 1000) -> None:
        self.books = Books()
        self.paused: list[bool] = []
        self.pressure = Pressure(most_unsent, self.paused.append, self.books.reporter)
        self.publisher = Publisher(
            self.books.queue,
            self.books.ledger,
            self.pressure,
            self.books.reporter,
            company_s=0.025,
            backoff=Backoff(0.001, 0.01),
            clock=self.books.clock,
        )

    async def flush(self) -> None:
        """Flush what is due now."""
        await self.publisher.flush(until=self.books.clock.now)


@pytest.fixture
def press() -> Press:
    """Give a publisher with nothing to do."""
    return Press()


async def test_one_flush_is_one_call_for_all_that_is_due(press: Press) -> None:
    """Three requests with tokens are one emit with three items."""
    for request_id in ("r1", "r2", "r3"):
        press.books.say(press.books.running(request_id), 0)
    await press.flush()
    assert [[i.request_id for i in items] for items in press.books.queue.emits] == [
        ["r1", "r2", "r3"]
    ]


async def test_what_is_not_due_waits(press: Press) -> None:
    """After its first token a request waits for company, while another's first goes out."""
    waiting = press.books.running("waiting")
    press.books.say(waiting, 0)
    await press.flush()
    press.books.say(waiting, 1)
    press.books.say(press.books.running("new"), 0)
    await press.flush()
    assert [item.request_id for item in press.books.queue.emits[-1]] == ["new"]
    press.books.clock.advance(0.05)
    await press.flush()
    assert [item.request_id for item in press.books.queue.emits[-1]] == ["waiting"]


async def test_slow_steps_are_flushed_as_they_come(press: Press) -> None:
    """Where the next step ends after the interval, one flush takes the tokens of this one."""
    requests = [press.books.running(request_id) for request_id in ("r1", "r2")]
    for token_id in range(2):
        for request in requests:
            press.books.say(request, token_id)
        press.publisher.stepped(0.08)
        await press.flush()
        press.books.clock.advance(0.08)
    assert [len(items) for items in press.books.queue.emits] == [2, 2]


async def test_fast_steps_share_a_flush(press: Press) -> None:
    """Where more tokens come within the interval, those that are here wait for them."""
    request = press.books.running()
    for token_id in range(5):
        press.books.say(request, token_id)
        press.publisher.stepped(0.02)
        await press.flush()
        press.books.clock.advance(0.02)
    assert [[item.num_tokens for item in items] for items in press.books.queue.emits] == [[1], [3]]


async def test_an_end_takes_its_tokens_along_at_once(press: Press) -> None:
    """The last tokens do not wait for company; the terminal entry follows in the same flush."""
    request = press.books.running()
    press.books.say(request, 0)
    await press.flush()
    press.books.say(request, 1)
    press.books.ledger.end(request, LENGTH_REACHED)
    await press.flush()
    assert press.books.queue.logs["r1"] == [0, 1]
    assert "r1" in press.books.queue.ended
    assert request.phase is Phase.FINISHED


async def test_many_ends_at_once_do_not_run_out_of_connections(press: Press) -> None:
    """Two hundred requests end in one step: a flush finishes some, the next ones the others."""
    for number in range(200):
        request = press.books.running(f"r{number}")
        press.books.say(request, 0)
        press.books.ledger.end(request, LENGTH_REACHED)
    await press.flush()
    assert len(press.books.queue.ended) == FINISHES_AT_A_TIME
    await press.publisher.flush_everything()
    assert len(press.books.queue.ended) == 200


@pytest.mark.parametrize("outcome", [EmitOutcome.FENCED, EmitOutcome.DONE, EmitOutcome.GONE])
async def test_a_refused_emit_drops_and_aborts(press: Press, outcome: EmitOutcome) -> None:
    """Another holder, an end, or nothing at all: the engine stops in its next step."""
    request = press.books.running()
    press.books.say(request, 0)
    press.books.queue.emit_script = [outcome]
    await press.flush()
    assert request.phase is Phase.DROPPED
    assert press.books.aborted == [request.seq_id]


async def test_a_cancel_is_learnt_from_the_emit(press: Press) -> None:
    """The tokens count, and the request ends as cancelled in the same flush."""
    request = press.books.running()
    press.books.say(request, 0)
    press.books.queue.emit_script = [EmitOutcome.CANCEL]
    await press.flush()
    assert press.books.aborted == [request.seq_id]
    assert press.books.queue.ended["r1"].finish_reason == "cancelled"


async def test_an_emit_that_is_answered_with_a_finish_ends_the_request(press: Press) -> None:
    """A client wants what there is: it is published with the text, and is no error."""
    request = press.books.running()
    press.books.say(request, 0)
    press.books.queue.emit_script = [EmitOutcome.FINISH]
    await press.flush()
    assert press.books.aborted == [request.seq_id]
    assert press.books.queue.ended["r1"].finish_reason == "stopped_early"


async def test_a_gap_is_filled_from_its_offset(press: Press) -> None:
    """Redis forgot the last tokens: the next flush brings them again."""
    request = press.books.running()
    press.books.say(request, 0, 1, 2)
    await press.flush()
    del press.books.queue.logs["r1"][1:]
    press.books.say(request, 3)
    await press.publisher.flush_everything()
    assert press.books.queue.logs["r1"] == [0, 1, 2, 3]


async def test_a_lost_reply_is_followed_by_the_same_slice(press: Press) -> None:
    """Nothing doubles: the repetition is a replay, and then come the tokens made meanwhile."""
    request = press.books.running()
    press.books.say(request, 0, 1)
    press.books.queue.loses_replies = True
    with pytest.raises(TransportError):
        await press.flush()
    press.books.queue.loses_replies = False
    press.books.say(request, 2)
    await press.publisher.flush_everything()
    sent = [(i.offset, i.num_tokens) for items in press.books.queue.emits for i in items]
    assert sent == [(0, 2), (0, 2), (2, 1)]
    assert press.books.queue.logs["r1"] == [0, 1, 2]


async def test_a_log_with_more_tokens_than_we_made_is_left_alone(press: Press) -> None:
    """It cannot be ours, whatever the epoch says."""
    request = press.books.running()
    press.books.queue.logs["r1"] = list(range(9))
    press.books.say(request, 0, 1)
    press.books.queue.emit_script = [EmitOutcome.OVERLAP]
    await press.flush()
    assert request.phase is Phase.DROPPED


async def test_too_many_unsent_tokens_pause_the_engine_until_half_are_gone() -> None:
    """At the cap decoding stops; a flush that brings the count down lets it go on."""
    press = Press(most_unsent=4)
    request = press.books.running()
    press.books.queue.is_down = True
    press.books.say(request, 0, 1, 2, 3)
    press.publisher.notify()
    assert press.paused == [True]
    press.books.queue.is_down = False
    await press.flush()
    assert press.paused == [True, False]


async def test_the_loop_survives_an_outage(press: Press) -> None:
    """While Redis is away nothing is lost and nothing fails; afterwards all goes out."""
    request = press.books.running()
    press.books.queue.is_down = True
    running = asyncio.create_task(press.publisher.run())
    try:
        press.books.say(request, 0, 1)
        press.publisher.notify()
        await asyncio.sleep(0)
        press.books.queue.is_down = False

        async def is_published() -> bool:
            return press.books.queue.logs.get("r1") == [0, 1]

        await eventually_async(is_published)
    finally:
        running.cancel()


@pytest.mark.parametrize("num_turns", range(5))
async def test_a_stop_ends_it_also_when_news_come_at_that_moment(
    press: Press, num_turns: int
) -> None:
    """Whatever turn of the loop the cancellation meets after news, it is not lost."""
    running = asyncio.create_task(press.publisher.run())
    request = press.books.running("r1")
    press.books.say(request, 0)
    await press.flush()
    press.books.say(request, 1)  # due only later, so it sleeps with a limit
    press.publisher.notify()
    for _ in range(5):
        await asyncio.sleep(0)
    press.publisher.notify()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=PATIENCE_S)
    assert done
