"""A sequence knows its progress, refuses impossible moves, and says when it is over."""

from __future__ import annotations

import pytest

from headrace_worker.engine.messages import SequenceFinish
from headrace_worker.engine.sequence import Sequence, SequenceStatus
from support.oracle import request


def make_sequence(token_ids: list[int], **options: object) -> Sequence:
    """Build a waiting sequence."""
    return Sequence(request(1, token_ids, **options), arrival=1)  # type: ignore[arg-type]


def test_a_new_sequence_waits_with_everything_to_compute() -> None:
    """Before its first step a sequence holds no block and has computed nothing."""
    seq = make_sequence([5, 6, 7])
    assert seq.status is SequenceStatus.WAITING
    assert (seq.num_tokens, seq.num_output_tokens, seq.num_uncomputed_tokens) == (3, 0, 3)
    assert seq.block_table == []


def test_preempting_gives_all_blocks_back_and_keeps_the_tokens() -> None:
    """A preempted sequence loses its computed tokens, never its token ids."""
    seq = make_sequence([5, 6, 7])
    seq.start([], 0)
    seq.block_table, seq.num_computed_tokens = [4, 9], 3
    seq.token_ids.append(8)
    assert seq.preempt() == [4, 9]
    assert (seq.status, seq.num_computed_tokens) == (SequenceStatus.WAITING, 0)
    assert (seq.block_table, seq.num_tokens, seq.num_preemptions) == ([], 4, 1)


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    """What a resumed sequence finds in the cache is its own work, so usage does not count it."""
    seq = make_sequence([1] * 9)
    seq.start([3], 4)
    seq.preempt()
    seq.start([3, 7], 8)
    assert (seq.num_cached_tokens, seq.num_computed_tokens) == (4, 8)


@pytest.mark.parametrize("moves", [("preempt",), ("start", "start"), ("finish", "finish")])
def test_an_impossible_move_raises(moves: tuple[str, ...]) -> None:
    """Only the moves drawn in the state table are allowed."""
    seq = make_sequence([1])
    arguments = {"start": ([], 0)}
    for move in moves[:-1]:
        getattr(seq, move)(*arguments.get(move, ()))
    with pytest.raises(RuntimeError, match="sequence 1 cannot go from"):
        getattr(seq, moves[-1])(*arguments.get(moves[-1], ()))


def test_a_stop_token_counts_only_as_output() -> None:
    """A prompt may end with a stop token; only a generated one ends the sequence."""
    assert make_sequence([1, 9], stop_token_ids=(9,)).finish_reason(64) is None
    resumed = make_sequence([1, 9], num_prompt_tokens=1, stop_token_ids=(9,))
    assert resumed.finish_reason(64) is SequenceFinish.STOP


def test_max_tokens_counts_what_earlier_epochs_emitted() -> None:
    """A takeover does not start the count again."""
    seq = make_sequence([1, 2, 3, 4], num_prompt_tokens=1, max_tokens=3)
    assert seq.finish_reason(64) is SequenceFinish.LENGTH
    assert make_sequence([1, 2, 3], num_prompt_tokens=1, max_tokens=3).finish_reason(64) is None


def test_a_full_context_ends_with_length() -> None:
    """When prompt and output fill the context, the sequence is over."""
    seq = make_sequence([1] * 7, max_tokens=100)
    assert seq.remaining_output_tokens(8) == 1
    seq.token_ids.append(2)
    assert seq.finish_reason(8) is SequenceFinish.LENGTH


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    """The model's own end wins over the limit that is reached with the same token."""
    seq = make_sequence([1, 9], num_prompt_tokens=1, max_tokens=1, stop_token_ids=(9,))
    assert seq.finish_reason(64) is SequenceFinish.STOP


def test_lower_priority_numbers_and_earlier_arrivals_rank_first() -> None:
    """Rank sorts by priority, then by arrival."""
    commands = [request(1, [1], priority=4), request(2, [1], priority=0), request(3, [1])]
    seqs = [Sequence(command, arrival) for arrival, command in enumerate(commands)]
    assert [seq.seq_id for seq in sorted(seqs, key=lambda seq: seq.rank)] == [2, 1, 3]
