"""The outbox: which tokens go out when, and where it stands after any answer of Redis."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.protocol import ChunkMessage
from headrace.types import TokenLogprob
from headrace_worker.engine.messages import SampledToken
from headrace_worker.serving.outbox import (
    MAX_SLICE_TOKENS,
    EmitPolicy,
    Outbox,
    OutputToken,
    from_chunks,
    output_token,
)

POLICY = EmitPolicy(
    interval_s=0.05, max_tokens=8, unattended_interval_s=1.0, unattended_max_tokens=64
)


def filled(count: int, *, attached: bool = True, inherited: int = 0) -> Outbox:
    """Return an outbox with tokens that all came at second 10."""
    outbox = Outbox(POLICY, attached=attached, emitted=map(OutputToken, range(inherited)))
    for token_id in range(inherited, inherited + count):
        outbox.append(OutputToken(token_id, "x"), 10.0)
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
    outbox.append(OutputToken(1), 20.0)
    assert outbox.due_at() == 20.05


def test_a_full_outbox_is_due_at_once() -> None:
    """Eight waiting tokens do not wait any longer."""
    outbox = filled(1)
    outbox.settle(1, now=10.0)
    for token_id in range(8):
        outbox.append(OutputToken(token_id), 20.0)
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
    assert piece.to_message() == ChunkMessage((4, 5, 6), ("x", "x", "x"))


def test_an_unanswered_slice_goes_out_again_unchanged() -> None:
    """Tokens that came meanwhile are left for later, so that Redis sees a replay."""
    outbox = filled(3)
    first = outbox.next_slice()
    outbox.append(OutputToken(9), 11.0)
    assert outbox.next_slice() == first


def test_the_rest_follows_the_acknowledgement() -> None:
    """After the answer the tokens that came meanwhile are next."""
    outbox = filled(3)
    outbox.next_slice()
    outbox.append(OutputToken(9), 11.0)
    assert outbox.settle(3, now=12.0)
    piece = outbox.next_slice()
    assert piece is not None
    assert (piece.offset, [t.token_id for t in piece.tokens]) == (3, [9])
    assert outbox.due_at() == 12.05


def test_a_gap_goes_back() -> None:
    """A log that lost acknowledged tokens gets them again, from its own offset on."""
    outbox = filled(6)
    outbox.next_slice()
    outbox.settle(6, now=11.0)
    assert outbox.settle(2, now=12.0)
    piece = outbox.next_slice()
    assert piece is not None
    assert [token.token_id for token in piece.tokens] == [2, 3, 4, 5]


def test_a_log_that_knows_more_is_somebody_elses() -> None:
    """More tokens than were ever made here cannot be ours: nothing changes, and False says so."""
    outbox = filled(2)
    assert not outbox.settle(3, now=11.0)
    assert outbox.num_unacknowledged == 2


def test_a_slice_is_bounded() -> None:
    """After a long outage the backlog goes out in entries of bounded size."""
    piece = filled(MAX_SLICE_TOKENS + 5).next_slice()
    assert piece is not None
    assert len(piece.tokens) == MAX_SLICE_TOKENS


def test_chunks_turn_back_into_tokens() -> None:
    """What a log holds becomes tokens with their pieces and logprobs again."""
    logprob = TokenLogprob(7, -0.5)
    chunks = [ChunkMessage((7,), ("a",), (logprob,)), ChunkMessage((8, 9), ("", "b"))]
    assert from_chunks(chunks) == [
        OutputToken(7, "a", logprob),
        OutputToken(8, ""),
        OutputToken(9, "b"),
    ]


def test_logprobs_are_kept_only_when_the_engine_gave_them() -> None:
    """A token without a logprob has none on the wire."""
    assert output_token(SampledToken(1, 5), "x") == OutputToken(5, "x")
    with_top = output_token(SampledToken(1, 5, -0.25, ((5, -0.25),)), "x")
    assert with_top.logprob == TokenLogprob(5, -0.25, ((5, -0.25),))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["append", "send", "lose", "roll back"]), max_size=60))
def test_any_history_of_losses_leaves_each_token_once(events: list[str]) -> None:
    """Against a log that applies, loses and forgets, the log ends up equal to the tokens."""
    outbox, log, made = Outbox(POLICY, attached=True), [], 0

    def send(is_answered: bool) -> None:
        if (piece := outbox.next_slice()) is None:
            return
        if piece.offset == len(log):
            log.extend(token.token_id for token in piece.tokens)
        if is_answered:
            assert outbox.settle(len(log), now=0.0)

    for event in events:
        if event == "append":
            outbox.append(OutputToken(made), 0.0)
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
