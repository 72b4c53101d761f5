"""The scheduler when blocks run out: who is preempted, how often, and who returns when."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace_worker.engine.scheduler import Scheduler
from headrace_worker.engine.sequence import Sequence, SequenceStatus
from headrace_worker.engine.settings import Reserve
from support.oracle import request
from support.scheduling import add, advance, make_scheduler, shares


def test_out_of_blocks_the_newest_is_preempted_and_nobody_enters() -> None:
    """The victim waits in front of later arrivals, and admission pauses for that step."""
    scheduler = make_scheduler(num_blocks=6)
    add(scheduler, 1, 8, max_tokens=16)
    victim = add(scheduler, 2, 8, max_tokens=2)
    advance(scheduler)
    victim.token_ids += [1] * 7  # outgrows what was expected of it
    victim.sampling = request(2, [1], max_tokens=16).sampling
    later = add(scheduler, 3, 1, max_tokens=1)
    step = None
    for seq_id in range(100, 120):  # in each step something urgent and tiny arrives
        urgent = add(scheduler, seq_id, 1, max_tokens=1, priority=0)
        step = advance(scheduler)
        if step.preempted:
            break
    assert step is not None
    assert [seq.seq_id for seq in step.preempted] == [2]
    assert step.admitted == []
    assert scheduler.waiting == [urgent, victim, later]


def test_the_least_urgent_is_preempted_even_when_it_is_older() -> None:
    """Priority comes before age."""
    scheduler = make_scheduler(num_blocks=5)
    add(scheduler, 1, 7, max_tokens=4, priority=9)
    advance(scheduler)
    urgent = add(scheduler, 2, 7, max_tokens=4, priority=0)
    advance(scheduler)
    for seq in scheduler.running:
        seq.sampling = request(seq.seq_id, [1], max_tokens=16).sampling
        seq.token_ids += [1] * 4
    step = advance(scheduler)
    assert [seq.seq_id for seq in step.preempted] == [1]
    assert urgent.status is SequenceStatus.RUNNING


def test_a_victim_that_had_its_turn_gives_its_budget_back() -> None:
    """Preempting a sequence that was already scheduled in this step takes its share out."""
    scheduler = make_scheduler(num_blocks=4, budget=16)
    add(scheduler, 1, 5, max_tokens=4, priority=9)
    urgent = add(scheduler, 2, 7, max_tokens=4, priority=0)
    advance(scheduler)
    for seq in scheduler.running:
        seq.sampling = request(seq.seq_id, [1], max_tokens=16).sampling
    urgent.token_ids += [1] * 4  # now a prefill: it comes after the decode of 1
    step = scheduler.schedule()
    assert shares(step) == {2: 5}
    assert step.budget_left == 11


def test_two_that_together_exceed_the_pool_do_not_play_ping_pong() -> None:
    """Both finish, with fewer preemptions than twice the requests (B35)."""
    scheduler = make_scheduler(num_blocks=9)
    for seq_id in (1, 2):
        add(scheduler, seq_id, 4, max_tokens=17)  # 5 blocks each in the end
    num_preemptions = num_steps = 0
    while scheduler.running or scheduler.waiting:
        num_preemptions += len(advance(scheduler).preempted)
        num_steps += 1
    assert 0 < num_preemptions < 4
    assert num_steps < 60


def teach_that_answers_are_short(scheduler: Scheduler) -> None:
    """Let many sequences leave after one token of the hundred that they may generate."""
    short = Sequence(request(99, [1, 2], num_prompt_tokens=1, max_tokens=100), arrival=0)
    for _ in range(200):
        scheduler.admission.learn_from(short)


def test_a_wrong_guess_of_the_growth_costs_each_sequence_two_preemptions_at_most() -> None:
    """After many short answers come long ones: the second time all that can come is kept (B35)."""
    scheduler = make_scheduler(num_blocks=14)
    teach_that_answers_are_short(scheduler)
    for seq_id in range(1, 9):
        add(scheduler, seq_id, 4, max_tokens=8 + 4 * seq_id)
    preempted: list[int] = []
    while scheduler.running or scheduler.waiting:
        preempted += [seq.seq_id for seq in advance(scheduler).preempted]
    assert 1 <= max(Counter(preempted).values()) <= 2


@pytest.mark.parametrize(("num_preemptions", "returns"), [(1, True), (2, False)])
def test_after_a_preemption_an_engine_with_room_does_not_run_empty(
    num_preemptions: int, returns: bool
) -> None:
    """A victim of a large max_tokens waits for the worst case only after the second time."""
    scheduler = make_scheduler(num_blocks=40, max_model_len=160)
    teach_that_answers_are_short(scheduler)
    for seq_id in (1, 2):
        add(scheduler, seq_id, 4, max_tokens=150)
    advance(scheduler)
    victim = add(scheduler, 3, 4, max_tokens=150)
    victim.num_preemptions = num_preemptions
    advance(scheduler)
    assert (victim in scheduler.running) == returns


def test_a_max_tokens_beyond_the_context_means_what_the_context_can_hold() -> None:
    """Answers that fill the context have used all they could, however much they asked for."""
    scheduler = make_scheduler(num_blocks=32, max_model_len=64)
    full = Sequence(request(98, [1] * 64, num_prompt_tokens=4, max_tokens=10**6), arrival=0)
    for _ in range(300):
        scheduler.admission.learn_from(full)
    for seq_id in range(1, 5):
        add(scheduler, seq_id, 4, max_tokens=10**6)
    advance(scheduler)
    assert len(scheduler.running) == 2  # 16 blocks each


def test_an_exhausted_short_answer_says_nothing_about_a_long_one() -> None:
    """Those that use all of a max_tokens of 4 do not keep those out that may use 100."""
    scheduler = make_scheduler(num_blocks=32)
    teach_that_answers_are_short(scheduler)
    exhausted = Sequence(request(98, [1] * 5, num_prompt_tokens=1, max_tokens=4), arrival=0)
    for _ in range(20):
        scheduler.admission.learn_from(exhausted)
    for seq_id in range(1, 5):
        add(scheduler, seq_id, 4, max_tokens=100)
    advance(scheduler)
    assert len(scheduler.running) == 4


def test_worst_reserve_never_preempts() -> None:
    """With room reserved for max_tokens, whoever entered stays."""
    scheduler = make_scheduler(num_blocks=9, reserve=Reserve.WORST)
    for seq_id in range(1, 7):
        add(scheduler, seq_id, 4, max_tokens=17)
    while scheduler.running or scheduler.waiting:
        assert advance(scheduler).preempted == []
