"""The engine when blocks are short or shared: preemption, aborts, cached prefixes, takeovers."""

from __future__ import annotations

import pytest

from headrace_worker.attention.base import PackedBatch
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.messages import SequenceFinish
from headrace_worker.engine.settings import Reserve
from support.oracle import OracleDecoder, make_engine, request, run, solo

NO_REASON_TO_END = 10_000


def long_prompt(seq_id: int, length: int) -> list[int]:
    """Tokens that differ from sequence to sequence."""
    return [(seq_id * 11 + i * i) % 61 for i in range(length)]


def everything_is_free(engine: Engine) -> bool:
    """Whether no block is held and nothing is scheduled."""
    pool = engine.scheduler.pool
    pool.check_integrity()
    return pool.num_free == pool.num_blocks and not engine.has_work


def test_preempted_answers_are_complete_and_nothing_is_said_twice() -> None:
    """Six requests in a pool for three: preempted, recomputed, and equal to the solo run (B34)."""
    commands = [request(i, long_prompt(i, 6), max_tokens=14, temperature=0.9) for i in range(1, 7)]
    answers = run(make_engine(num_blocks=11), *commands)
    assert answers.num_preemptions >= 1
    assert answers.tokens == {command.seq_id: solo(command) for command in commands}


def test_penalties_survive_a_preemption() -> None:
    """The split into prompt and output is kept when a sequence is recomputed (B26)."""
    options = {"max_tokens": 14, "presence_penalty": 1.0, "repetition_penalty": 1.2}
    commands = [request(i, long_prompt(i, 6), **options) for i in range(1, 7)]
    answers = run(make_engine(num_blocks=11), *commands)
    assert answers.num_preemptions >= 1
    assert answers.tokens == {command.seq_id: solo(command) for command in commands}


def test_two_requests_one_block_too_large_for_the_pool_both_finish() -> None:
    """No preempt and resume without end (B35)."""
    commands = [request(i, long_prompt(i, 4), max_tokens=17) for i in (1, 2)]
    answers = run(make_engine(num_blocks=9), *commands, max_steps=80)
    assert set(answers.finished) == {1, 2}
    assert answers.num_preemptions < 4


def test_worst_case_reserve_serves_the_same_without_preemption() -> None:
    """The cautious mode trades concurrency, not answers."""
    commands = [request(i, long_prompt(i, 6), max_tokens=14) for i in range(1, 7)]
    answers = run(make_engine(num_blocks=11, reserve=Reserve.WORST), *commands)
    assert answers.num_preemptions == 0
    assert answers.tokens == {command.seq_id: solo(command) for command in commands}


@pytest.mark.parametrize("num_steps", [0, 1, 3, 6, 30])
def test_an_abort_in_any_state_frees_everything_and_may_be_repeated(num_steps: int) -> None:
    """Waiting, mid-prefill, decoding or finished: afterwards all blocks are free (B36)."""
    engine = make_engine(max_num_seqs=1)
    engine.add(request(1, long_prompt(1, 40), max_tokens=20))
    for _ in range(num_steps):
        if engine.has_work:
            engine.step()
    engine.abort([1, 77])
    engine.abort([1])
    while engine.has_work:
        assert engine.step().tokens == ()
    assert everything_is_free(engine)


def test_an_abort_of_a_preempted_sequence_frees_everything() -> None:
    """Sent back to waiting and dropped there: nothing stays behind (B36)."""
    engine = make_engine(num_blocks=11)
    for seq_id in range(1, 7):
        engine.add(request(seq_id, long_prompt(seq_id, 6), max_tokens=14))
    while not (preempted := engine.step().preempted):
        pass
    engine.abort(preempted)
    answers = run(engine)
    assert not set(preempted) & set(answers.tokens)
    assert everything_is_free(engine)


def test_an_abort_is_followed_by_news_of_the_free_blocks() -> None:
    """Whoever claims by free blocks hears about them, also when nothing else is running."""
    engine = make_engine(num_blocks=20)
    engine.add(request(1, long_prompt(1, 16), max_tokens=30))
    assert engine.step().free_blocks < 20
    engine.abort([1])
    assert engine.has_work
    assert engine.step().free_blocks == 20
    assert not engine.has_work


def test_answers_that_end_with_a_stop_string_let_more_requests_in() -> None:
    """They end with an abort, and what they left of their max_tokens is learned all the same."""
    engine = make_engine(num_blocks=60)
    for seq_id in range(1, 200):
        engine.add(request(seq_id, [1, 2], max_tokens=100))
        engine.step()
        engine.abort([seq_id])
        engine.step()
    for seq_id in range(201, 209):
        engine.add(request(seq_id, [seq_id % 60], max_tokens=100))
    assert engine.step().num_running == 8


def test_a_second_batch_on_the_same_engine_is_complete() -> None:
    """Ten requests, then ten more: twenty answers (B39)."""
    engine = make_engine()
    for base in (0, 10):
        commands = [request(base + i, long_prompt(base + i, 5)) for i in range(10)]
        assert run(engine, *commands).tokens == {c.seq_id: solo(c) for c in commands}
    assert everything_is_free(engine)


def test_a_repeated_add_is_counted_but_does_not_start_twice() -> None:
    """The same id again leaves the first unharmed (B37)."""
    engine = make_engine()
    answers = run(engine, request(1, [1, 2]), request(1, [1, 2]))
    assert answers.tokens == {1: solo(request(1, [1, 2]))}
    assert answers.outcomes[0].adds_seen == 2


def test_a_cached_prefix_gives_the_same_answer_and_says_how_much_it_saved() -> None:
    """The second of two equal prompts reuses the first one's blocks (B33)."""
    engine = make_engine()
    commands = [request(i, long_prompt(1, 21), salt=b"a") for i in (1, 2)]
    first, second = (run(engine, command) for command in commands)
    assert first.tokens[1] == second.tokens[2] == solo(commands[0])
    assert first.outcomes[0].admitted == ((1, 0),)
    assert second.outcomes[0].admitted == ((2, 20),)


def test_tenants_never_share_a_prefix() -> None:
    """The same prompt under another salt is computed from its beginning (B33)."""
    engine = make_engine()
    run(engine, request(1, long_prompt(1, 21), salt=b"a"))
    answers = run(engine, request(2, long_prompt(1, 21), salt=b"b"))
    assert answers.outcomes[0].admitted == ((2, 0),)


def test_a_resumed_sequence_saves_no_more_than_its_prompt() -> None:
    """Its own output may be cached, too, but usage counts cached tokens of the prompt."""
    engine = make_engine()
    answers = run(engine, request(1, long_prompt(1, 9), max_tokens=12))
    token_ids = [*long_prompt(1, 9), *answers.tokens[1][:11]]
    again = run(engine, request(2, token_ids, num_prompt_tokens=9, max_tokens=12))
    assert again.outcomes[0].admitted == ((2, 9),)


def test_a_resumed_sequence_goes_on_where_the_log_ends() -> None:
    """Prompt and emitted tokens in, the rest of the very same answer out."""
    command = request(1, long_prompt(1, 9), max_tokens=12, temperature=1.0, min_tokens=5)
    whole = solo(command)
    for emitted in (1, 5, 11):
        token_ids = [*command.token_ids, *whole[:emitted]]
        resumed = request(
            1, token_ids, num_prompt_tokens=9, max_tokens=12, temperature=1.0, min_tokens=5
        )
        assert run(make_engine(), resumed).tokens[1] == whole[emitted:]


@pytest.mark.parametrize(
    ("emitted", "reason"), [([4, 5, 6], SequenceFinish.LENGTH), ([4, 9], SequenceFinish.STOP)]
)
def test_a_resumed_sequence_that_was_over_finishes_without_a_forward(
    emitted: list[int], reason: SequenceFinish
) -> None:
    """The worker died between the last token and the finish: nothing is generated beyond it."""
    batches: list[PackedBatch] = []
    engine = make_engine(decoder=OracleDecoder(on_forward=batches.append))
    command = request(1, [1, 2, *emitted], num_prompt_tokens=2, max_tokens=3, stop_token_ids=(9,))
    answers = run(engine, command)
    assert (answers.finished, answers.tokens, batches) == ({1: reason}, {}, [])
