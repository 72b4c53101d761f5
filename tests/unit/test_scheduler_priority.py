"""The scheduler and priorities: who is sooner, and what a change of priority does."""

from __future__ import annotations

from headrace_worker.engine.sequence import SequenceStatus
from support.oracle import request
from support.scheduling import add, advance, make_scheduler


def test_a_waiting_sequence_changes_its_place() -> None:
    """It keeps its arrival: among equals, who came first goes first."""
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, 1, 4)
    advance(scheduler)
    first, second, third = (add(scheduler, seq_id, 4) for seq_id in (2, 3, 4))
    scheduler.reprioritise(third, 0)
    assert scheduler.waiting == [third, first, second]
    scheduler.reprioritise(third, 5)
    assert scheduler.waiting == [first, second, third]
    scheduler.reprioritise(first, 9)
    assert scheduler.waiting == [second, third, first]


def test_a_running_sequence_changes_who_gives_way() -> None:
    """Out of blocks, the one that has become less urgent is preempted, although it is older."""
    scheduler = make_scheduler(num_blocks=5)
    older = add(scheduler, 1, 7, max_tokens=4)
    newer = add(scheduler, 2, 7, max_tokens=4)
    advance(scheduler)
    scheduler.reprioritise(older, 6)
    for seq in scheduler.running:
        seq.sampling = request(seq.seq_id, [1], max_tokens=16).sampling
        seq.token_ids += [1] * 4
    assert advance(scheduler).preempted == [older]
    assert newer.status is SequenceStatus.RUNNING
    assert scheduler.waiting == [older]
