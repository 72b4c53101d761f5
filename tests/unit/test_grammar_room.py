"""All outputs of one compile share the library's room for its states; none fails for the others."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLParserLimits

from headrace_worker.engine.engine import Engine
from headrace_worker.engine.grammar import GrammarTokens, _without_forcing
from headrace_worker.engine.messages import AddSequence
from support.grammars import (
    everything_is_free,
    oracle_tokens,
    regex_grammar,
    roomy,
    run_grammars,
    wait_for_work,
)
from support.oracle import Answers, request

EXPLODES = regex_grammar("(.*[ab].{18}){1,3}")  # its states are as many as there are texts
NUM_STATES = 200  # enough for one output, not for two


class TightTokens(GrammarTokens):
    """Has little room, so that it is used up by a few outputs instead of by those of a day."""

    def compile(self, grammar: str) -> LLMatcher:
        """Return the matcher with less room than a worker has."""
        limits = LLParserLimits(verbose_errors=False, max_lexer_states=NUM_STATES)
        matcher = LLMatcher(self.tokenizer, _without_forcing(grammar), log_level=0, limits=limits)
        matcher.compute_bitmask()
        return matcher


def tight(**options: bool) -> Engine:
    """Return an engine with such tokens."""
    known = oracle_tokens()
    tokens = TightTokens(known.tokenizer, known.executor, known.eos_token_ids, known.eos_mask)
    return roomy(load_tokens=lambda: tokens, **options)


def exploding(seq_id: int, num_tokens: int = 30) -> AddSequence:
    """Return a request that wanders through states of its own."""
    return request(
        seq_id, [4, seq_id], grammar=EXPLODES, max_tokens=num_tokens, temperature=1.0, logprobs=1
    )


def waiting_again(engine: Engine) -> set[int]:
    """Return those whose grammar is being compiled though they have some output."""
    waiting = (engine._sequences[seq_id] for seq_id in engine._without_grammar)
    return {seq.seq_id for seq in waiting if seq.num_output_tokens}


def alone(seq_id: int) -> list[int]:
    """Return its output in an engine of its own, with all the room of a worker."""
    return run_grammars(roomy(), exploding(seq_id)).tokens[seq_id]


def test_a_schema_that_was_served_all_day_is_still_served() -> None:
    """What earlier outputs left behind is no reason to refuse the next one."""
    engine = tight()
    for seq_id in range(8):
        answers = run_grammars(engine, exploding(seq_id))
        assert answers.tokens.get(seq_id) == alone(seq_id)
    assert everything_is_free(engine)


@pytest.mark.parametrize("one_ahead", [False, True])
def test_outputs_of_one_grammar_do_not_fail_for_each_other(one_ahead: bool) -> None:
    """Each is the same beside seven others as alone, and no token is told twice."""
    engine = tight(one_ahead=one_ahead)
    answers = run_grammars(engine, *map(exploding, range(8)))
    assert not answers.failed
    assert answers.tokens == {seq_id: alone(seq_id) for seq_id in range(8)}
    assert everything_is_free(engine)


def test_running_out_of_room_is_not_taken_for_the_end_of_an_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a grammar may end, a state that failed allows only the end, and must not be asked."""
    monkeypatch.setattr(f"{__name__}.NUM_STATES", 80)
    ends_anywhere = regex_grammar("(.*[ab].{18}){1,3}|.*")
    commands = [
        request(i, [4, i], grammar=ends_anywhere, max_tokens=30, temperature=1.0) for i in range(8)
    ]
    together = run_grammars(tight(), *commands)
    expected = [run_grammars(roomy(), command).tokens[command.seq_id] for command in commands]
    assert [together.tokens[i] for i in range(8)] == expected


def test_a_neighbour_without_a_grammar_does_not_notice_it() -> None:
    """Its tokens are those of a run without them."""
    plain = request(90, [7, 9], temperature=1.0, max_tokens=40)
    beside = run_grammars(tight(), plain, *map(exploding, range(8)))
    assert beside.tokens[90] == run_grammars(tight(), plain).tokens[90]


def test_an_abort_is_heard_while_its_grammar_is_compiled_again() -> None:
    """It waits like a new one, and leaves as little behind (B36)."""
    engine, answers = tight(), Answers()
    for seq_id in range(8):
        engine.add(exploding(seq_id))
    while wait_for_work(engine) and not (again := waiting_again(engine)):
        answers.take(engine.step())
    engine.abort(again)
    run_grammars(engine, answers=answers)
    rest = set(range(8)) - again
    assert set(answers.finished) == rest
    assert all(answers.tokens[seq_id] == alone(seq_id) for seq_id in rest)
    assert everything_is_free(engine)


def test_an_output_that_has_no_room_alone_fails_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not compiled for ever: each time has to bring it a token further."""
    monkeypatch.setattr(f"{__name__}.NUM_STATES", 5)
    engine = tight()
    answers = run_grammars(engine, exploding(1), request(2, [5]))
    assert answers.failed[1].code == "invalid_request"
    assert "the grammar cannot go on" in answers.failed[1].message
    assert answers.tokens[2] == run_grammars(roomy(), request(2, [5])).tokens[2]
    assert everything_is_free(engine)
