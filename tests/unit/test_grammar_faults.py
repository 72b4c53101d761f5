"""What goes wrong with a grammar, and who leaves meanwhile, is that request's affair alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.grammars import (
    GRAMMARS,
    TOKENS,
    alone,
    ask,
    choice_grammar,
    everything_is_free,
    make_grammar_engine,
    regex_grammar,
    roomy,
    run_grammars,
    schema_grammar,
    wait_for_work,
)
from support.oracle import Answers, OracleDecoder, make_engine, request, run, solo


@pytest.mark.parametrize(
    "options",
    [
        {"bad_words": ((TOKENS.index("x"),),)},
        {"stop_token_ids": (TOKENS.index("x"),), "min_tokens": 2},
    ],
    ids=["bad words", "min tokens"],
)
def test_options_that_leave_the_grammar_nothing_fail_that_request_alone(
    options: dict[str, Any],
) -> None:
    """The message says that they contradict each other."""
    command = request(1, [4], grammar=regex_grammar("xy+z"), **options)
    answers = run_grammars(roomy(), command, ask(2, "schema"))
    assert answers.failed[1].code == "invalid_request"
    assert "the grammar and the other options contradict each other" in answers.failed[1].message
    assert tuple(answers.tokens[2]) == alone("schema", 2)


def test_a_grammar_beyond_the_vocabulary_fails_that_request_alone() -> None:
    """Where no token of the model goes on, the message says so."""
    command = request(1, [4], grammar=regex_grammar("ab(é|è)"))
    answers = run_grammars(roomy(), command, ask(2, "schema"))
    assert answers.failed[1].code == "invalid_request"
    assert "no token of this model fits" in answers.failed[1].message
    assert tuple(answers.tokens[2]) == alone("schema", 2)


def test_a_row_of_nan_is_the_models_fault_also_under_a_grammar() -> None:
    """It is not taken for a contradiction, and its blocks serve nobody."""
    engine = roomy(decoder=OracleDecoder(nan_after=60))
    answers = run_grammars(engine, request(1, [4, 60], grammar=GRAMMARS["choice"]))
    assert answers.failed[1].code == "engine_failure"
    assert "no finite maximum" in answers.failed[1].message


@pytest.mark.parametrize("grammar", [regex_grammar("("), schema_grammar({"type": "nope"}), "{}"])
def test_an_invalid_grammar_fails_alone_and_the_engine_lives(grammar: str) -> None:
    """The others are answered, and so is the next request (B49)."""
    engine = roomy()
    answers = run_grammars(engine, request(1, [4], grammar=grammar), ask(2, "schema"))
    assert answers.failed[1].code == "invalid_request"
    assert tuple(answers.tokens[2]) == alone("schema", 2)
    assert tuple(run_grammars(engine, ask(3, "regex")).tokens[3]) == alone("regex", 3)
    assert everything_is_free(engine)


def test_emitted_tokens_that_break_the_grammar_fail_as_our_fault() -> None:
    """It cannot happen, and if it does the request can be tried again."""
    command = request(1, [4, 5], num_prompt_tokens=1, grammar=choice_grammar("ab"))
    assert run_grammars(roomy(), command).failed[1].code == "engine_failure"


def test_an_engine_without_a_tokenizer_refuses_grammars_alone() -> None:
    """It was started by hand; the others are served."""
    answers = run(make_engine(), ask(1, "schema"), request(2, [5]))
    assert "without a tokenizer" in answers.failed[1].message
    assert answers.tokens[2] == solo(request(2, [5]))


def test_a_grammar_never_meets_a_prompt_that_can_never_run() -> None:
    """The refusal comes at once, as without it."""
    engine = roomy(max_model_len=8)
    engine.add(request(1, [4] * 9, grammar=GRAMMARS["schema"]))
    assert engine.has_work
    assert engine.step().failed[0].code == "context_length_exceeded"


def test_a_sequence_that_waits_for_its_grammar_counts_where_blocks_are_promised() -> None:
    """Nobody else is claimed into its place, and there is nothing to step before it comes."""
    engine = make_grammar_engine(num_blocks=64)
    free = run_grammars(engine, request(1, [3])).outcomes[-1].free_blocks
    engine.add(ask(2, "schema"))
    assert not engine.has_work
    engine.add(request(3, [5], max_tokens=1))
    outcome = engine.step()
    assert outcome.adds_seen == 3
    assert outcome.num_waiting == 0
    assert outcome.free_blocks < free
    rest = run_grammars(engine)
    assert tuple(rest.tokens[2]) == alone("schema", 2)


def test_an_abort_while_its_grammar_is_compiled_leaves_nothing_behind() -> None:
    """The blocks that were promised are told free again, and nothing comes later (B36)."""
    engine = make_grammar_engine(num_blocks=64)
    engine.add(ask(1, "schema"))
    engine.abort([1, 1])
    assert engine.has_work
    assert engine.step().free_blocks == 64
    assert not wait_for_work(engine)
    again = run_grammars(engine, replace(ask(1, "schema"), seq_id=2))
    assert len(again.tokens[2]) == len(again.sampled[2]) > 0
    assert everything_is_free(engine)


@pytest.mark.parametrize("num_steps", [1, 3, 6])
def test_an_abort_in_the_midst_of_a_grammar_frees_its_blocks(num_steps: int) -> None:
    """And its neighbour with the same grammar goes on (B36)."""
    engine, answers = roomy(), Answers()
    engine.add(ask(1, "schema"))
    engine.add(ask(2, "schema"))
    for _ in range(num_steps):
        assert wait_for_work(engine)
        answers.take(engine.step())
    engine.abort([1])
    run_grammars(engine, answers=answers)
    assert tuple(answers.tokens[2]) == alone("schema", 2)
    assert everything_is_free(engine)


def test_a_repeated_command_is_taken_once() -> None:
    """Also while its grammar is compiled."""
    engine = roomy()
    answers = run_grammars(engine, ask(1, "schema"), ask(1, "schema"))
    assert tuple(answers.tokens[1]) == alone("schema", 1)
