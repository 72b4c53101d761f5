"""The scheduler and priorities: who is sooner, who gives way, and who is never passed for ever."""

from __future__ import annotations

import pytest

from headrace_worker.engine.scheduler import Scheduler
from headrace_worker.engine.sequence import AGEING_STEPS, Sequence, SequenceStatus
from headrace_worker.engine.settings import Reserve
from support.oracle import request
from support.scheduling import add, advance, make_scheduler, shares


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


def _fill_with_batch(scheduler: Scheduler, count: int = 3) -> list[Sequence]:
    """Let sequences of priority 9 run, four blocks each with what they will generate."""
    batch = [add(scheduler, seq_id, 8, max_tokens=9, priority=9) for seq_id in range(1, count + 1)]
    while any(seq.num_uncomputed_tokens > 1 for seq in batch):
        advance(scheduler)
    assert scheduler.running == batch
    return batch


def test_short_of_blocks_the_last_of_a_later_priority_gives_way() -> None:
    """The sooner one runs in that very step, and no more give way than it takes."""
    scheduler = make_scheduler(num_blocks=12, reserve=Reserve.EXPECTED)
    batch = _fill_with_batch(scheduler)
    urgent = add(scheduler, 9, 16, max_tokens=1, priority=0)
    step = advance(scheduler)
    assert step.preempted == [batch[2]]
    assert shares(step)[urgent.seq_id] > 1
    assert scheduler.waiting == [batch[2]]
    assert batch[2].num_preemptions == 0  # nobody misjudged it


def test_short_of_places_in_the_batch_one_gives_way() -> None:
    """Blocks are free, and every place is taken by a later priority."""
    scheduler = make_scheduler(max_num_seqs=3)
    batch = _fill_with_batch(scheduler)
    urgent = add(scheduler, 9, 4, priority=0)
    assert advance(scheduler).preempted == [batch[2]]
    assert scheduler.running == [*batch[:2], urgent]


def test_whoever_gave_way_resumes_without_loss() -> None:
    """Its tokens are those that it had, and it ends with as many as it was to have."""
    scheduler = make_scheduler(num_blocks=12)
    batch = _fill_with_batch(scheduler)
    said = list(batch[2].token_ids)
    add(scheduler, 9, 16, max_tokens=2, priority=0)
    while scheduler.running or scheduler.waiting:
        advance(scheduler)
    assert batch[2].token_ids[: len(said)] == said
    assert {seq.num_output_tokens for seq in batch} == {9}


def test_nobody_gives_way_where_that_is_not_enough() -> None:
    """What is computed is not thrown away for one that cannot enter even so."""
    scheduler = make_scheduler(num_blocks=12, budget=64)
    add(scheduler, 7, 24, max_tokens=9, priority=0)
    late = add(scheduler, 8, 4, max_tokens=4, priority=9)
    advance(scheduler)
    add(scheduler, 9, 24, max_tokens=1, priority=0)
    assert advance(scheduler).preempted == []
    assert late.status is SequenceStatus.RUNNING


@pytest.mark.parametrize(
    ("priority", "reserve"), [(9, Reserve.EXPECTED), (0, Reserve.WORST)], ids=["equal", "worst"]
)
def test_equals_wait_and_whoever_reserves_for_the_worst_is_never_stopped(
    priority: int, reserve: Reserve
) -> None:
    """An earlier arrival of the same priority keeps its blocks, and so does everybody in worst."""
    scheduler = make_scheduler(num_blocks=12, reserve=reserve)
    _fill_with_batch(scheduler)
    urgent = add(scheduler, 9, 16, max_tokens=1, priority=priority)
    assert advance(scheduler).preempted == []
    assert scheduler.waiting == [urgent]


def test_a_long_prompt_of_later_priority_takes_what_a_sooner_one_leaves() -> None:
    """The sooner prompt is computed in the step in which it comes, the other goes on beside it."""
    scheduler = make_scheduler(budget=16)
    long = add(scheduler, 1, 60, priority=9)
    advance(scheduler)
    urgent = add(scheduler, 2, 12, priority=0)
    step = advance(scheduler)
    assert shares(step) == {urgent.seq_id: 12, long.seq_id: 4}
    assert step.preempted == []
    assert shares(advance(scheduler)) == {urgent.seq_id: 1, long.seq_id: 15}


def test_of_two_prompts_under_way_the_sooner_goes_first() -> None:
    """Also when both take several steps, and the later one was there before."""
    scheduler = make_scheduler(budget=16)
    long = add(scheduler, 1, 60, priority=9)
    advance(scheduler)
    urgent = add(scheduler, 2, 40, priority=0)
    assert [shares(advance(scheduler)) for _ in range(3)] == [
        {urgent.seq_id: 16},
        {urgent.seq_id: 16},
        {urgent.seq_id: 8, long.seq_id: 8},
    ]


def test_a_later_priority_is_not_passed_for_ever() -> None:
    """A steady stream of sooner ones, one a step: after so many steps a place, it is its turn."""
    scheduler = make_scheduler(max_num_seqs=1)
    patient = add(scheduler, 1, 4, max_tokens=3, priority=1)
    served_at = None
    for step in range(1, AGEING_STEPS + 50):
        add(scheduler, 1 + step, 4, max_tokens=1, priority=0, step=step)
        advance(scheduler)
        if patient.num_output_tokens and served_at is None:
            served_at = step
        if patient.status is SequenceStatus.FINISHED:
            break
    assert served_at is not None
    assert AGEING_STEPS - 5 <= served_at <= AGEING_STEPS + 5
    assert patient.num_output_tokens == 3  # and nobody drove it out again


def test_whoever_has_waited_long_enough_does_not_give_way() -> None:
    """It has caught up with newcomers of a sooner priority, also as a holder of blocks."""
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, 1, 4, max_tokens=9, priority=1)
    advance(scheduler)
    add(scheduler, 2, 4, priority=0, step=AGEING_STEPS + 1)
    assert advance(scheduler).preempted == []
    add(scheduler, 3, 4, priority=0, step=AGEING_STEPS - 1)
    assert [seq.seq_id for seq in advance(scheduler).preempted] == [1]
