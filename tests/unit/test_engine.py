"""What users see of the engine: each test is a fault that some engine had, and ours never has."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from headrace_worker.attention.base import PackedBatch
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.messages import AddSequence, SequenceFinish
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
        request(1, [3], bad_words=((5,), (5, 64))),
        request(1, [3], bad_words=((5,), ())),
        request(1, []),
    ],
    ids=["beyond", "negative", "bias", "bad-word", "no-word", "empty"],
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


def test_the_answers_to_one_prompt_share_its_blocks() -> None:
    """With n > 1 the prompt is computed once; each answer is that of the solo run (B17)."""
    commands = [request(i, long_prompt(1, 33), temperature=1.0, seed=i) for i in (1, 2, 3, 4)]
    answers = run(make_engine(max_num_batched_tokens=64), *commands)
    cached = dict(pair for outcome in answers.outcomes for pair in outcome.admitted)
    assert cached == {1: 0, 2: 32, 3: 32, 4: 32}
    assert answers.tokens == {command.seq_id: solo(command) for command in commands}


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


def test_an_outcome_tells_how_much_was_computed_and_who_waits() -> None:
    """The numbers of a step are those of that step."""
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=8)
    for seq_id in (1, 2, 3):
        engine.add(request(seq_id, long_prompt(seq_id, 6)))
    outcome = engine.step()
    assert (outcome.num_scheduled_tokens, outcome.num_prefill_tokens) == (8, 8)
    assert outcome.num_scheduled_seqs == 2
    assert (outcome.num_running, outcome.num_waiting, outcome.adds_seen) == (2, 1, 3)
    assert [token.seq_id for token in outcome.tokens] == [1]
    assert outcome.step == 1


def test_a_sequence_that_ends_in_a_step_was_in_it() -> None:
    """The last share counts although nobody runs any more afterwards."""
    engine = make_engine()
    engine.add(request(1, [1, 2], max_tokens=1))
    outcome = engine.step()
    assert (outcome.num_scheduled_seqs, outcome.num_running) == (1, 0)


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
