"""The scheduler: decodes first, prompts in chunks, admission by blocks, rare preemption."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace_worker.engine.admission import Admission
from headrace_worker.engine.block_pool import BlockPool
from headrace_worker.engine.scheduler import Schedule, Scheduler
from headrace_worker.engine.sequence import Sequence, SequenceStatus
from headrace_worker.engine.settings import Reserve
from support.oracle import request


def make_scheduler(
    *,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    budget: int = 16,
    max_model_len: int = 128,
    reserve: Reserve = Reserve.EXPECTED,
) -> Scheduler:
    """Build a scheduler over blocks of four tokens."""
    pool = BlockPool(num_blocks, 4)
    admission = Admission(pool, max_model_len=max_model_len, reserve=reserve)
    return Scheduler(pool, admission, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)


def add(scheduler: Scheduler, seq_id: int, num_tokens: int, **options: object) -> Sequence:
    """Queue a sequence with tokens of its own."""
    token_ids = [(seq_id * 7 + i) % 61 for i in range(num_tokens)]
    seq = Sequence(request(seq_id, token_ids, **options), arrival=seq_id)  # type: ignore[arg-type]
    scheduler.add(seq)
    return seq


def advance(scheduler: Scheduler) -> Schedule:
    """Do one step: whatever samples gets a token."""
    step = scheduler.schedule()
    sampling = [share.seq for share in step.scheduled.values() if share.samples]
    scheduler.commit(step.scheduled.values())
    for seq in sampling:
        seq.token_ids.append(seq.seq_id)
        if seq.finish_reason(scheduler.admission.max_model_len):
            scheduler.remove(seq)
    scheduler.pool.check_integrity()
    return step


def shares(step: Schedule) -> dict[int, int]:
    """Return how many tokens each sequence runs."""
    return {seq_id: share.num_new_tokens for seq_id, share in step.scheduled.items()}


def test_a_long_prompt_is_cut_by_the_token_budget() -> None:
    """No step runs more tokens than the budget; only the last chunk samples (B52)."""
    scheduler = make_scheduler(budget=7)
    add(scheduler, 1, 16)
    steps = [scheduler.schedule()]
    assert [share.samples for share in steps[0].scheduled.values()] == [False]
    scheduler.commit(steps[0].scheduled.values())
    assert [shares(advance(scheduler)) for _ in range(3)] == [{1: 7}, {1: 2}, {1: 1}]


def test_decodes_never_wait_for_a_long_prompt() -> None:
    """A running decode gets its token in every step while a prompt is computed beside it."""
    scheduler = make_scheduler(budget=8)
    add(scheduler, 1, 4)
    advance(scheduler)
    add(scheduler, 2, 30)
    assert [shares(advance(scheduler)) for _ in range(3)] == [{1: 1, 2: 7}] * 3


def test_running_prefills_go_before_waiting_sequences() -> None:
    """A prompt that was begun is finished before the next is begun."""
    scheduler = make_scheduler(budget=6)
    add(scheduler, 1, 10)
    add(scheduler, 2, 5)
    assert [shares(advance(scheduler)) for _ in range(2)] == [{1: 6}, {1: 4, 2: 2}]


def test_a_sooner_priority_enters_first() -> None:
    """Waiting sequences enter by priority, then by arrival."""
    scheduler = make_scheduler(budget=4)
    add(scheduler, 1, 4, priority=4)
    add(scheduler, 2, 4, priority=0)
    assert shares(advance(scheduler)) == {2: 4}


def test_no_more_sequences_run_than_allowed() -> None:
    """max_num_seqs holds even when blocks and budget would do for more."""
    scheduler = make_scheduler(max_num_seqs=2)
    for seq_id in (1, 2, 3):
        add(scheduler, seq_id, 3)
    assert shares(advance(scheduler)) == {1: 3, 2: 3}


def test_a_prompt_enters_only_when_its_expected_end_fits() -> None:
    """Prompt blocks alone are not enough: running and new sequences still have to grow."""
    scheduler = make_scheduler(num_blocks=8)
    add(scheduler, 1, 8, max_tokens=16)  # 2 blocks now, 4 expected
    add(scheduler, 2, 12, max_tokens=16)  # 3 blocks now, 5 expected
    step = advance(scheduler)
    assert shares(step) == {1: 8}
    assert [seq.seq_id for seq in scheduler.waiting] == [2]


def test_a_waiting_head_that_does_not_fit_is_not_overtaken() -> None:
    """Short prompts do not starve a long one."""
    scheduler = make_scheduler(num_blocks=8)
    add(scheduler, 1, 8, max_tokens=16)
    add(scheduler, 2, 20, max_tokens=4)
    add(scheduler, 3, 1, max_tokens=1)
    assert shares(advance(scheduler)) == {1: 8}


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


def test_a_cached_prefix_is_not_computed_again() -> None:
    """The second prompt with the same beginning runs only what differs."""
    scheduler = make_scheduler(budget=64)
    first = add(scheduler, 1, 12, max_tokens=1)
    advance(scheduler)
    again = Sequence(request(2, [*first.token_ids[:12], 9]), arrival=2)
    scheduler.add(again)
    assert shares(advance(scheduler)) == {2: 1}
    assert again.num_cached_tokens == 12


def test_a_fully_cached_prompt_still_computes_one_block() -> None:
    """Without a computed token there would be no logits to sample from."""
    scheduler = make_scheduler(budget=64)
    first = add(scheduler, 1, 8, max_tokens=1)
    advance(scheduler)
    again = Sequence(request(2, first.token_ids[:8]), arrival=2)
    scheduler.add(again)
    assert shares(advance(scheduler)) == {2: 4}


def test_a_shared_prefix_counts_once_for_admission() -> None:
    """Blocks that a running sequence holds anyway cost the newcomer nothing."""
    scheduler = make_scheduler(num_blocks=7, budget=64)
    first = add(scheduler, 1, 16, max_tokens=2)
    advance(scheduler)
    scheduler.add(Sequence(request(2, [*first.token_ids[:16], 1], max_tokens=2), arrival=2))
    assert shares(advance(scheduler)) == {1: 1, 2: 1}


def test_claimable_blocks_are_what_nobody_here_will_need() -> None:
    """The promise to the queue: free blocks, less the growth of running and waiting sequences."""
    scheduler = make_scheduler(num_blocks=10, reserve=Reserve.WORST)
    running = add(scheduler, 1, 4, max_tokens=5)  # 2 blocks in the end
    waiting = add(scheduler, 2, 8, max_tokens=5)  # 3 blocks in the end
    assert scheduler.admission.claimable_blocks([running, waiting]) == 5
    advance(scheduler)
    assert scheduler.admission.claimable_blocks([running, waiting]) == 5
    huge = [add(scheduler, seq_id, 30) for seq_id in (3, 4)]
    assert scheduler.admission.claimable_blocks([running, waiting, *huge]) == 0


def test_the_expected_growth_is_learned_from_what_finished() -> None:
    """When answers end early, more sequences are let in; when they use all of max_tokens, fewer."""
    scheduler = make_scheduler(num_blocks=64, max_model_len=200)
    probe = Sequence(request(99, [1] * 4, max_tokens=100), arrival=99)
    before = scheduler.admission.claimable_blocks([probe])
    short = Sequence(request(1, [1] * 3, num_prompt_tokens=2, max_tokens=100), arrival=1)
    for _ in range(50):
        scheduler.admission.learn_from(short)
    assert scheduler.admission.claimable_blocks([probe]) > before


@pytest.mark.parametrize(
    ("num_prompt_tokens", "code"),
    [
        (62, None),
        (63, None),
        (64, "context_length_exceeded"),
        (1000, "context_length_exceeded"),
    ],
)
def test_a_prompt_without_room_for_output_is_refused(
    num_prompt_tokens: int, code: str | None
) -> None:
    """The limit is prompt + 1 <= max_model_len, and what breaks it is told so at once (B10)."""
    admission = make_scheduler(max_model_len=64).admission
    refusal = admission.refusal(Sequence(request(1, [1] * num_prompt_tokens), arrival=1))
    assert (refusal.code if refusal else None) == code


def test_a_prompt_larger_than_the_pool_is_refused_with_its_own_code() -> None:
    """What the configuration allows but the KV cache cannot hold is another answer (B10)."""
    admission = make_scheduler(num_blocks=4, max_model_len=64).admission
    assert admission.max_model_len == 16
    assert admission.refusal(Sequence(request(1, [1] * 15), arrival=1)) is None
    refusal = admission.refusal(Sequence(request(1, [1] * 16), arrival=1))
    assert refusal is not None
    assert refusal.code == "kv_capacity_exceeded"
    assert "16 tokens" in refusal.message
