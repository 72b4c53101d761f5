"""The scheduler: decodes first, prompts in chunks, admission by blocks, cached prefixes."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_worker.engine.scheduler import Scheduler
from headrace_worker.engine.sequence import Sequence
from headrace_worker.engine.settings import Reserve
from support.oracle import request
from support.scheduling import add, advance, make_scheduler, shares


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


def add_equal(scheduler: Scheduler, seq_id: int, num_tokens: int, **options: Any) -> Sequence:
    """Queue a sequence with the same tokens as all others that are added so."""
    salt = options.pop("salt", b"")
    command = request(seq_id, list(range(num_tokens)), salt=salt, **options)
    seq = Sequence(command, arrival=seq_id)
    scheduler.add(seq)
    return seq


def test_equal_prompts_that_come_together_compute_their_prefix_once() -> None:
    """As n > 1 answers do: the others wait a step, and then share the first one's blocks."""
    scheduler = make_scheduler(budget=64)
    first, *others = [add_equal(scheduler, i, 14) for i in (1, 2, 3)]
    assert shares(advance(scheduler)) == {1: 14}
    assert shares(advance(scheduler)) == {1: 1, 2: 2, 3: 2}
    assert all(seq.block_table[:3] == first.block_table[:3] for seq in others)


def test_a_prompt_that_is_computed_in_chunks_is_waited_for_once_it_ends() -> None:
    """While it takes the whole budget nobody enters anyway; in its last step there is room."""
    scheduler = make_scheduler(budget=10)
    for seq_id in (1, 2):
        add_equal(scheduler, seq_id, 22)
    assert [shares(advance(scheduler)) for _ in range(3)] == [{1: 10}, {1: 10}, {1: 2, 2: 2}]


def test_a_short_or_foreign_prefix_is_not_waited_for() -> None:
    """A single block is computed in less than a step, and another tenant's is never shared."""
    scheduler = make_scheduler(budget=64)
    add_equal(scheduler, 1, 14)
    add_equal(scheduler, 2, 7)
    add_equal(scheduler, 3, 14, salt=b"another")
    add_equal(scheduler, 4, 14, prompt_logprobs=0)
    assert shares(advance(scheduler)) == {1: 14, 2: 7, 3: 14, 4: 14}


def test_whoever_waits_for_a_prefix_is_passed_but_keeps_its_place() -> None:
    """Later sequences use the step, but not the room that it will take."""
    scheduler = make_scheduler(budget=64, max_num_seqs=3)
    for seq_id in (1, 2):
        add_equal(scheduler, seq_id, 14)
    add(scheduler, 3, 5)
    add(scheduler, 4, 5)
    assert shares(advance(scheduler)) == {1: 14, 3: 5}
    assert shares(advance(scheduler)) == {1: 1, 3: 1, 2: 2}


def test_blocks_are_kept_for_whoever_waits_for_a_prefix() -> None:
    """One behind it that would take its blocks stays behind it."""
    scheduler = make_scheduler(num_blocks=10, budget=64)
    for seq_id in (1, 2):
        add_equal(scheduler, seq_id, 14, max_tokens=3)
    add(scheduler, 3, 9, max_tokens=4)
    assert shares(advance(scheduler)) == {1: 14}
    assert shares(advance(scheduler)) == {1: 1, 2: 2, 3: 9}
