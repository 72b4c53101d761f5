"""What users see of the engine: each test is a fault that some engine had, and ours never has."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from headrace_worker.attention.base import PackedBatch
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.errors import EngineStepError
from headrace_worker.engine.messages import AddSequence, SequenceFinish
from headrace_worker.engine.settings import Reserve
from support.oracle import Answers, OracleDecoder, make_engine, request, run, solo

NO_REASON_TO_END = 10_000


def long_prompt(seq_id: int, length: int) -> list[int]:
    """Tokens that differ from sequence to sequence."""
    return [(seq_id * 11 + i * i) % 61 for i in range(length)]


def everything_is_free(engine: Engine) -> bool:
    """Whether no block is held and nothing is scheduled."""
    pool = engine.scheduler.pool
    pool.check_integrity()
    return pool.num_free == pool.num_blocks and not engine.has_work


def test_every_token_appears_once_and_the_last_comes_with_the_finish() -> None:
    """The finish never overtakes or drops the last token (B51)."""
    answers = run(
        make_engine(), request(1, [1, 2, 3], max_tokens=1), request(2, [4], max_tokens=11)
    )
    assert [len(answers.tokens[seq_id]) for seq_id in (1, 2)] == [1, 11]
    for outcome in answers.outcomes:
        reported = {token.seq_id for token in outcome.tokens}
        assert {seq_id for seq_id, _ in outcome.finished} <= reported


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunked_prefill_changes_nothing_and_says_nothing_early(chunk: int) -> None:
    """In any chunks: no token before the prompt ends, then those of the solo run (B52)."""
    command = request(1, long_prompt(1, 33))
    answers = run(make_engine(max_num_seqs=1, max_num_batched_tokens=chunk), command)
    first = next(outcome.step for outcome in answers.outcomes if outcome.tokens)
    assert first == -(-33 // chunk)
    assert answers.tokens[1] == solo(command)


@pytest.mark.parametrize(
    ("max_tokens", "expected"), [(0, 0), (1, 1), (5, 5)], ids=["none", "one", "five"]
)
def test_max_tokens_is_exact_and_leaks_nothing(max_tokens: int, expected: int) -> None:
    """Zero tokens is an empty answer, one is one; both end with length (B13)."""
    engine = make_engine()
    answers = run(engine, request(1, [1, 2, 3], max_tokens=max_tokens))
    assert len(answers.tokens.get(1, [])) == expected
    assert answers.finished == {1: SequenceFinish.LENGTH}
    assert everything_is_free(engine)


def test_a_prompt_that_is_too_long_fails_and_the_next_is_served() -> None:
    """A refusal is an answer, not the end of the engine (B10)."""
    engine = make_engine(max_model_len=64)
    commands = [request(i, [1] * length) for i, length in enumerate((63, 64, 65, 1000), start=1)]
    answers = run(engine, *commands, request(9, [1, 2]))
    assert {seq_id: failure.code for seq_id, failure in answers.failed.items()} == dict.fromkeys(
        (2, 3, 4), "context_length_exceeded"
    )
    assert answers.finished[1] is SequenceFinish.LENGTH
    assert len(answers.tokens[9]) == 8


def test_an_answer_that_fills_the_context_ends_with_length() -> None:
    """max_model_len bounds prompt and output together."""
    answers = run(make_engine(max_model_len=12), request(1, [1] * 8, max_tokens=NO_REASON_TO_END))
    assert len(answers.tokens[1]) == 4
    assert answers.finished == {1: SequenceFinish.LENGTH}


def test_an_answer_that_fills_the_pool_ends_with_length() -> None:
    """Alone in a pool smaller than its context, a sequence ends instead of starving."""
    answers = run(make_engine(num_blocks=3), request(1, [1] * 8, max_tokens=NO_REASON_TO_END))
    assert len(answers.tokens[1]) == 4
    assert answers.finished == {1: SequenceFinish.LENGTH}


@pytest.mark.parametrize(
    "command",
    [
        request(1, [3, 64]),
        request(1, [3, -1]),
        request(1, [3], logit_bias=((999_999, 5.0),)),
        request(1, []),
    ],
    ids=["beyond", "negative", "bias", "empty"],
)
def test_a_token_outside_the_vocabulary_fails_its_request_only(command: AddSequence) -> None:
    """An impossible id never reaches the model (B21)."""
    answers = run(make_engine(), command, request(2, [5]))
    assert answers.failed[1].code == "invalid_request"
    assert answers.tokens[2] == solo(request(2, [5]))


@pytest.mark.parametrize("order", list(permutations((1, 2, 3))))
@pytest.mark.parametrize("stagger", [0, 1, 3])
def test_a_seeded_answer_does_not_depend_on_order(order: tuple[int, ...], stagger: int) -> None:
    """In any order, at once or steps apart, each answer is that of the solo run (B16)."""
    commands = {i: request(i, long_prompt(i, 4 + i), temperature=1.0, top_p=0.95) for i in order}
    engine, answers = make_engine(), Answers()
    for seq_id in order:
        engine.add(commands[seq_id])
        for _ in range(stagger):
            answers.take(engine.step())
    while engine.has_work:
        answers.take(engine.step())
    assert answers.tokens == {i: solo(commands[i]) for i in order}


def test_equal_prompts_with_different_seeds_differ_and_repeat_exactly() -> None:
    """n > 1 is n seeds: different answers, the same ones on a rerun (B17)."""
    commands = [request(i, [1, 2, 3], temperature=1.0, seed=100 + i) for i in (1, 2, 3)]
    once, again = run(make_engine(), *commands), run(make_engine(), *commands)
    assert len({tuple(tokens) for tokens in once.tokens.values()}) == 3
    assert once.tokens == again.tokens


def test_any_of_several_end_tokens_stops_but_not_before_min_tokens() -> None:
    """With ends 5 and 9 and a model that prefers 9: neither in the first four, then 9 (B27)."""
    decoder = OracleDecoder(bias={9: 100.0, 5: 50.0})
    command = request(1, [1, 2], max_tokens=20, stop_token_ids=(5, 9), min_tokens=4)
    answers = run(make_engine(decoder=decoder), command)
    assert not {5, 9} & set(answers.tokens[1][:4])
    assert answers.tokens[1][4:] == [9]
    assert answers.finished == {1: SequenceFinish.STOP}


def test_ignoring_the_end_means_all_end_tokens() -> None:
    """Without stop ids a model that only says the end goes on to max_tokens (B28)."""
    decoder = OracleDecoder(bias={9: 100.0})
    answers = run(make_engine(decoder=decoder), request(1, [1], max_tokens=20))
    assert answers.tokens[1] == [9] * 20
    assert answers.finished == {1: SequenceFinish.LENGTH}


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


def test_a_poisoned_row_fails_alone_and_its_blocks_serve_nobody() -> None:
    """NaN logits end that request; a neighbour is untouched, and the prefix is not reused."""
    engine = make_engine(decoder=OracleDecoder(nan_after=60), max_num_batched_tokens=64)
    prompt = [*long_prompt(1, 20), 60]
    answers = run(engine, request(1, prompt), request(2, [5, 6]))
    assert answers.failed[1].code == "engine_failure"
    assert answers.tokens[2] == solo(request(2, [5, 6]))
    again = run(engine, request(3, [*prompt, 1]))
    assert again.outcomes[0].admitted == ((3, 0),)
    assert everything_is_free(engine)


def test_a_step_that_fails_for_one_sequence_goes_on_with_the_others() -> None:
    """The named sequence fails; the others are computed again, and to the same answer."""

    def refuse_sequence_1(batch: PackedBatch) -> None:
        if bool((batch.input_ids == 60).any()):
            raise EngineStepError("it cannot be computed", (1,))

    engine = make_engine(decoder=OracleDecoder(on_forward=refuse_sequence_1))
    answers = run(engine, request(1, [1, 60]), request(2, [5, 6]))
    assert answers.failed[1].message == "it cannot be computed"
    assert answers.tokens[2] == solo(request(2, [5, 6]))


def test_a_broken_engine_names_everybody_who_was_in_the_batch() -> None:
    """An error that is nobody's fault is raised with all sequence ids, so the queue can know."""

    def break_down(batch: PackedBatch) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine = make_engine(decoder=OracleDecoder(on_forward=break_down))
    engine.add(request(4, [1]))
    engine.add(request(5, [2]))
    with pytest.raises(EngineStepError, match="illegal memory access") as caught:
        engine.step()
    assert sorted(caught.value.sequence_ids) == [4, 5]


def test_padding_beyond_the_tokenizer_is_never_sampled() -> None:
    """Logit rows that no token belongs to are cut off (B24)."""
    engine = make_engine(decoder=OracleDecoder(bias={62: 100.0, 63: 100.0}), sampled_vocab_size=62)
    command = request(1, [1, 2], temperature=1.0)
    assert max(run(engine, command).tokens[1]) < 62


@pytest.mark.parametrize(
    "command",
    [
        request(1, [1, 2], logit_bias=((63, 100.0), (5, 90.0))),
        request(1, [63, 2], repetition_penalty=1.2, logit_bias=((5, 90.0),)),
    ],
    ids=["bias", "penalty"],
)
def test_padding_in_a_request_does_not_break_the_engine(command: AddSequence) -> None:
    """An id between tokenizer and embedding may be biased or penalized: nobody dies (B21, B24)."""
    answers = run(make_engine(sampled_vocab_size=62), command, request(2, [5]))
    assert answers.tokens[1] == [5] * 8
    assert answers.tokens[2] == solo(request(2, [5]))


def test_an_outcome_tells_how_much_was_computed_and_who_waits() -> None:
    """The numbers of a step are those of that step."""
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=8)
    for seq_id in (1, 2, 3):
        engine.add(request(seq_id, long_prompt(seq_id, 6)))
    outcome = engine.step()
    assert (outcome.num_scheduled_tokens, outcome.num_prefill_tokens) == (8, 8)
    assert (outcome.num_running, outcome.num_waiting, outcome.adds_seen) == (2, 1, 3)
    assert [token.seq_id for token in outcome.tokens] == [1]
    assert outcome.step == 1


def test_the_batch_holds_decodes_first() -> None:
    """Backends may rely on the order that the contract promises."""
    batches: list[PackedBatch] = []
    engine = make_engine(decoder=OracleDecoder(on_forward=batches.append))
    engine.add(request(1, [1, 2, 3]))
    engine.step()
    run(engine, request(2, long_prompt(2, 30), priority=0))
    mixed = [batch for batch in batches if 0 < batch.num_decodes < batch.num_seqs]
    assert mixed
    for batch in batches:
        num_new = torch.diff(batch.cu_seqlens_q).tolist()
        assert num_new == sorted(num_new, key=lambda count: count > 1)
        assert batch.num_decodes == num_new.count(1)
