"""The outbox: which tokens go out when, and where it stands after any answer of Redis."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.protocol import ChunkMessage
from headrace.types import TokenLogprob
from headrace_worker.serving.outbox import MAX_SLICE_TOKENS, EmitPolicy, Outbox

POLICY = EmitPolicy(
    interval_s=0.05, max_tokens=8, unattended_interval_s=1.0, unattended_max_tokens=64
)


def filled(count: int, *, attached: bool = True, inherited: int = 0) -> Outbox:
    """Return an outbox with tokens that all came at second 10."""
    emitted = [ChunkMessage((token_id,), ("y",)) for token_id in range(inherited)]
    outbox = Outbox(POLICY, attached=attached, emitted=emitted)
    for token_id in range(inherited, inherited + count):
        outbox.append(token_id, "x", 10.0)
    return outbox


def test_an_empty_outbox_is_never_due() -> None:
    """With nothing to send there is no due time and no slice."""
    outbox = filled(0, inherited=3)
    assert outbox.due_at() is None
    assert outbox.next_slice() is None


def test_the_first_token_is_due_at_once() -> None:
    """A reader sees the first token as soon as it is there, also after a takeover."""
    assert filled(1).due_at() == 10.0
    assert filled(1, inherited=5).due_at() == 10.0


def test_later_tokens_wait_for_company() -> None:
    """After the first flush a token waits at most the interval."""
    outbox = filled(1)
    outbox.settle(1, now=10.0)
    outbox.append(1, "x", 20.0)
    assert outbox.due_at() == 20.05


def test_a_full_outbox_is_due_at_once() -> None:
    """Eight waiting tokens do not wait any longer."""
    outbox = filled(1)
    outbox.settle(1, now=10.0)
    for token_id in range(8):
        outbox.append(token_id, "x", 20.0)
    assert outbox.due_at() == 20.0


def test_a_request_that_nobody_streams_is_flushed_rarely() -> None:
    """Neither its first token nor eight of them hurry."""
    assert filled(8, attached=False).due_at() == 11.0
    assert filled(64, attached=False).due_at() == 10.0


def test_a_slice_starts_where_the_log_ends() -> None:
    """Its offset is the number of acknowledged tokens, those of earlier epochs counted."""
    piece = filled(3, inherited=4).next_slice()
    assert piece is not None
    assert (piece.offset, piece.end) == (4, 7)
    assert piece.message == ChunkMessage((4, 5, 6), ("x", "x", "x"))


def test_an_unanswered_slice_goes_out_again_unchanged() -> None:
    """Tokens that came meanwhile are left for later, so that Redis sees a replay."""
    outbox = filled(3)
    first = outbox.next_slice()
    outbox.append(9, "x", 11.0)
    assert outbox.next_slice() == first


def test_the_rest_follows_the_acknowledgement() -> None:
    """After the answer the tokens that came meanwhile are next."""
    outbox = filled(3)
    outbox.next_slice()
    outbox.append(9, "x", 11.0)
    assert outbox.settle(3, now=12.0)
    piece = outbox.next_slice()
    assert piece is not None
    assert (piece.offset, piece.message.token_ids) == (3, (9,))
    assert outbox.due_at() == 12.05


def test_a_gap_goes_back() -> None:
    """A log that lost acknowledged tokens gets them again, from its own offset on."""
    outbox = filled(6)
    outbox.next_slice()
    outbox.settle(6, now=11.0)
    assert outbox.settle(2, now=12.0)
    piece = outbox.next_slice()
    assert piece is not None
    assert piece.message.token_ids == (2, 3, 4, 5)


def test_a_log_that_knows_more_is_somebody_elses() -> None:
    """More tokens than were ever made here cannot be ours: nothing changes, and False says so."""
    outbox = filled(2)
    assert not outbox.settle(3, now=11.0)
    assert outbox.num_unacknowledged == 2


def test_a_slice_is_bounded() -> None:
    """After a long outage the backlog goes out in entries of bounded size."""
    piece = filled(MAX_SLICE_TOKENS + 5).next_slice()
    assert piece is not None
    assert piece.num_tokens == MAX_SLICE_TOKENS


def test_what_a_log_lost_goes_out_again_as_it_was() -> None:
    """Tokens of earlier epochs keep their text and logprobs, should Redis ask for them again."""
    logprobs = (TokenLogprob(7, -0.5), TokenLogprob(8, -0.25))
    emitted = [ChunkMessage((7,), ("a",), logprobs[:1]), ChunkMessage((8,), ("",), logprobs[1:])]
    outbox = Outbox(POLICY, attached=True, emitted=emitted)
    assert outbox.settle(0, now=1.0)
    piece = outbox.next_slice()
    assert piece is not None
    assert piece.message == ChunkMessage((7, 8), ("a", ""), logprobs)


def test_logprobs_are_sent_only_when_the_engine_gave_them() -> None:
    """A token without a logprob has none on the wire, and one with it has the best ones, too."""
    with_top = TokenLogprob(5, -0.25, ((5, -0.25),))
    outbox = Outbox(POLICY, attached=True)
    outbox.append(5, "x", 10.0, with_top)
    first = outbox.next_slice()
    assert first is not None
    assert first.message.logprobs == (with_top,)
    assert filled(1).next_slice() != first


def test_tokens_do_not_wait_where_no_others_will_have_come() -> None:
    """With steps longer than the interval, each token goes out as it comes."""
    outbox = filled(1)
    outbox.settle(1, now=10.0)
    outbox.append(1, "x", 20.0)
    assert outbox.due_at(next_step_at=20.01) == 20.05
    assert outbox.due_at(next_step_at=20.06) == 20.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["append", "send", "lose", "roll back"]), max_size=60))
def test_any_history_of_losses_leaves_each_token_once(events: list[str]) -> None:
    """Against a log that applies, loses and forgets, the log ends up equal to the tokens."""
    outbox, log, made = Outbox(POLICY, attached=True), [], 0

    def send(is_answered: bool) -> None:
        if (piece := outbox.next_slice()) is None:
            return
        if piece.offset == len(log):
            log.extend(piece.message.token_ids)
        if is_answered:
            assert outbox.settle(len(log), now=0.0)

    for event in events:
        if event == "append":
            outbox.append(made, "x", 0.0)
            made += 1
        elif event == "roll back":
            del log[len(log) // 2 :]
        else:
            send(is_answered=event == "send")
    while outbox.num_unacknowledged or len(log) < made:
        if outbox.num_unacknowledged == 0:
            outbox.settle(len(log), now=0.0)
        send(is_answered=True)
    assert log == list(range(made))
