"""An output keeps to its grammar, and is the same whatever happens beside it and to it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from headrace_worker.engine.messages import SequenceFinish
from support.grammars import (
    CHOICES,
    EOS_ID,
    GRAMMARS,
    REGEX,
    TOKENS,
    alone,
    ask,
    everything_is_free,
    make_grammar_engine,
    regex_grammar,
    roomy,
    run_grammars,
    text_of,
)
from support.oracle import OracleDecoder, make_engine, request, run


def follows(kind: str, text: str) -> bool:
    """Whether a whole text is in one of the grammars above."""
    if kind == "schema":
        person = json.loads(text)
        return {"name", "age"} <= set(person) and person["age"] <= 150
    if kind == "object":
        return isinstance(json.loads(text), dict)
    return bool(re.fullmatch(REGEX, text)) if kind == "regex" else text in CHOICES


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_whatever_is_drawn_follows_the_grammar(kind: str, temperature: float) -> None:
    """For many prompts and seeds, greedy and hot; what ran into max_tokens is only cut."""
    commands = [ask(i, kind, temperature=temperature, top_k=i % 3 * 20) for i in range(16)]
    engine = roomy(max_num_seqs=16)
    answers = run_grammars(engine, *commands)
    assert not answers.failed
    ended = [i for i, why in answers.finished.items() if why is SequenceFinish.STOP]
    assert len(ended) >= (8 if kind == "object" else 14)
    for seq_id in ended:
        assert follows(kind, text_of(answers.tokens[seq_id]))
    assert everything_is_free(engine)


@pytest.mark.parametrize("kind", GRAMMARS)
def test_an_output_is_the_same_alone_and_among_seven_others(kind: str) -> None:
    """With and without grammars of their own."""
    others = [ask(20 + i, other) for i, other in enumerate(GRAMMARS)]
    plain = [request(30 + i, [5 + i, 9], temperature=1.0, logprobs=2) for i in range(3)]
    answers = run_grammars(roomy(), *plain, ask(1, kind), *others)
    assert tuple(answers.tokens[1]) == alone(kind, 1)


def test_neighbours_do_not_notice_a_grammar() -> None:
    """Tokens and log-probabilities are, to the bit, those of a run without it."""
    plain = [request(i, [5 + i, 9], temperature=i / 2, logprobs=3, max_tokens=30) for i in range(4)]
    likes = OracleDecoder(bias={TOKENS.index(token): 2.0 for token in '"}'})
    without = run(make_engine(decoder=likes, num_blocks=512), *plain)
    beside = run_grammars(roomy(), *plain, *(ask(20 + i, kind) for i, kind in enumerate(GRAMMARS)))
    assert {i: beside.sampled[i] for i in range(4)} == without.sampled


@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_preempted_output_goes_on_where_it_was(kind: str) -> None:
    """In a pool too small for all, everybody is sent back at some time, and ends the same."""
    commands = [ask(seq_id, kind) for seq_id in range(8)]
    plain = [request(50 + i, [3 + i] * 9, max_tokens=60, temperature=1.0) for i in range(3)]
    engine = make_grammar_engine(num_blocks=34, max_num_batched_tokens=16)
    answers = run_grammars(engine, *plain, *commands)
    assert answers.num_preemptions > 0
    for seq_id in range(8):
        assert tuple(answers.tokens[seq_id]) == alone(kind, seq_id)
    assert everything_is_free(engine)


@pytest.mark.parametrize("kind", GRAMMARS)
def test_an_output_resumed_at_any_token_ends_the_same(kind: str) -> None:
    """A worker that takes over is given prompt and emitted tokens, and makes the rest."""
    expected = alone(kind, 3)
    command = ask(3, kind)
    resumed = [
        replace(command, seq_id=100 + n, token_ids=(*command.token_ids, *expected[:n]))
        for n in range(len(expected) + 1)
    ]
    answers = run_grammars(roomy(), *resumed)
    for n, takeover in enumerate(resumed):
        assert answers.tokens.get(takeover.seq_id, []) == list(expected[n:])
        assert answers.finished[takeover.seq_id] is SequenceFinish.STOP


def test_logprobs_are_those_of_the_model_without_the_grammar() -> None:
    """The grammar restricts the choice; it is not asked how likely the choice was."""
    command = ask(1, "choice", logprobs=64)
    (first, *_) = run_grammars(roomy(), command).sampled[1]
    free = replace(command, sampling=replace(command.sampling, grammar=None))
    (unbound, *_) = run_grammars(roomy(), free).sampled[1]
    assert first.top_logprobs == unbound.top_logprobs
    assert first.logprob == dict(first.top_logprobs)[first.token_id]


@pytest.mark.parametrize("stop_token_ids", [(), (EOS_ID,)], ids=["ignoring eos", "with eos"])
@pytest.mark.parametrize("min_tokens", [0, 50])
def test_a_complete_grammar_ends_the_output_by_itself(
    stop_token_ids: tuple[int, ...], min_tokens: int
) -> None:
    """Whether ends are ignored and however many tokens were asked for: nothing can follow."""
    command = ask(1, "schema", stop_token_ids=stop_token_ids, min_tokens=min_tokens)
    answers = run_grammars(roomy(), command)
    assert answers.finished[1] is SequenceFinish.STOP
    assert follows("schema", text_of(answers.tokens[1]))
    assert answers.tokens[1][-1] != EOS_ID


def test_the_models_end_is_an_end_where_the_grammar_may_end_even_when_ends_are_ignored() -> None:
    """A model that longs for the end gets it at the first place."""
    decoder = OracleDecoder(bias={EOS_ID: 100.0})
    command = request(1, [4], max_tokens=20, grammar=regex_grammar("[a-z]{3}[a-z]*"))
    answers = run_grammars(roomy(decoder=decoder), command)
    assert answers.tokens[1][-1] == EOS_ID
    assert 3 <= len(text_of(answers.tokens[1])) <= 6
    assert answers.finished[1] is SequenceFinish.STOP


def test_min_tokens_keeps_the_end_away_while_the_grammar_can_go_on() -> None:
    """Ends are masked before min_tokens, as ever."""
    decoder = OracleDecoder(bias={EOS_ID: 100.0})
    grammar = regex_grammar("[a-z]*")
    answers = run_grammars(roomy(decoder=decoder), request(1, [4], min_tokens=5, grammar=grammar))
    assert EOS_ID not in answers.tokens[1][:5]
    assert answers.tokens[1][5:] == [EOS_ID]


def test_a_stop_token_in_the_midst_of_a_grammar_ends_the_output() -> None:
    """What the request calls a stop is one."""
    comma = TOKENS.index(",")
    decoder = OracleDecoder(bias={comma: 100.0})
    command = request(
        1, [4], max_tokens=50, grammar=regex_grammar("[a-z]+(,[a-z]+){3}"), stop_token_ids=(comma,)
    )
    answers = run_grammars(roomy(decoder=decoder), command)
    assert answers.tokens[1][-1] == comma
    assert answers.finished[1] is SequenceFinish.STOP


def test_max_tokens_cuts_a_grammar_but_its_last_token_still_completes_it() -> None:
    """Length when something was left, stop when not, also for one who takes over."""
    command = request(1, [4], grammar=regex_grammar("[a-d]{9}"), max_tokens=9, bad_words=())
    whole = run_grammars(roomy(), command)
    assert whole.finished[1] is SequenceFinish.STOP
    used = len(whole.tokens[1])
    for max_tokens, reason in ((used, SequenceFinish.STOP), (used - 1, SequenceFinish.LENGTH)):
        cut = replace(command, sampling=replace(command.sampling, max_tokens=max_tokens))
        emitted = (*cut.token_ids, *whole.tokens[1][:max_tokens])
        for told in (cut, replace(cut, token_ids=emitted)):
            assert run_grammars(roomy(), told).finished[1] is reason


def test_no_tokens_are_made_for_max_tokens_zero_or_an_empty_grammar() -> None:
    """Both are over before they begin."""
    none = replace(ask(1, "schema"), sampling=replace(ask(1, "schema").sampling, max_tokens=0))
    answers = run_grammars(roomy(), none, request(2, [4], grammar=regex_grammar("")))
    assert answers.tokens == {}
    assert answers.finished == {1: SequenceFinish.LENGTH, 2: SequenceFinish.STOP}
