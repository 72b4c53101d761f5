"""The engine when something breaks: one request fails alone, or everybody is named."""

from __future__ import annotations

import pytest

from headrace_worker.attention.base import PackedBatch
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.errors import EngineStepError
from headrace_worker.engine.messages import AddSequence
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


def test_who_has_no_share_in_a_step_is_told_before_it_and_when_that_changes() -> None:
    """With room for one, the other two are bystanders; nobody is once each has its turn."""
    told: list[tuple[int, ...]] = []
    engine = make_engine(max_num_seqs=1)
    engine.on_bystanders = told.append
    answers = run(engine, request(1, [1]), request(2, [2]), request(3, [3]))
    assert told == [(2, 3), (3,), ()]
    assert set(answers.tokens) == {1, 2, 3}
