"""Grammars are compiled beside whoever asks: once for all who wait, within a bound, or refused."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace_worker.engine.grammar import GrammarState, GrammarTokens
from headrace_worker.engine.grammar_compiler import GrammarCompiler, GrammarRefusal
from headrace_worker.engine.loader import make_grammars
from headrace_worker.engine.settings import EngineSettings
from support.grammars import (
    EOS_ID,
    GRAMMAR_TIMEOUT_S,
    PERSON,
    TOKENS,
    choice_grammar,
    oracle_tokens,
    regex_grammar,
    save_tokenizer,
    schema_grammar,
)


def slow_grammar(number: int = 0) -> str:
    """Return a grammar that takes half a second, another for each number."""
    return choice_grammar(*(f"{number} {i:x}" for i in range(20_000)))


def make_compiler(compile_timeout_s: float = GRAMMAR_TIMEOUT_S) -> GrammarCompiler:
    """Return a compiler over the oracle's tokens."""
    return GrammarCompiler(oracle_tokens, compile_timeout_s=compile_timeout_s)


@contextmanager
def held_back() -> Iterator[tuple[GrammarCompiler, threading.Event]]:
    """Give a compiler that gets its tokens only when the event is set, or at the end."""
    gate = threading.Event()

    def load() -> GrammarTokens:
        assert gate.wait(GRAMMAR_TIMEOUT_S)
        return oracle_tokens()

    try:
        yield GrammarCompiler(load, compile_timeout_s=GRAMMAR_TIMEOUT_S), gate
    finally:
        gate.set()


def take_all(compiler: GrammarCompiler) -> dict[int, GrammarState | GrammarRefusal]:
    """Wait for everybody."""
    taken: dict[int, GrammarState | GrammarRefusal] = {}
    while compiler.is_waited_for:
        assert select.select([compiler], [], [], GRAMMAR_TIMEOUT_S)[0], "a compile never ended"
        taken.update(compiler.take())
    return taken


def compile_one(
    grammar: str, output: tuple[int, ...] = (), compile_timeout_s: float = GRAMMAR_TIMEOUT_S
) -> GrammarState | GrammarRefusal:
    """Return what comes of one grammar."""
    compiler = make_compiler(compile_timeout_s)
    compiler.submit(1, grammar, output)
    return take_all(compiler)[1]


def test_everybody_gets_a_state_of_their_own() -> None:
    """Two sequences of one grammar do not move each other."""
    compiler = make_compiler()
    for seq_id in (1, 2):
        compiler.submit(seq_id, choice_grammar("ab", "the"), ())
    states = take_all(compiler)
    first, second = states[1], states[2]
    assert isinstance(first, GrammarState)
    assert isinstance(second, GrammarState)
    assert first.accept(TOKENS.index("a"))
    assert second.accept(TOKENS.index("the"))


def test_one_compile_serves_all_who_ask_meanwhile_and_later() -> None:
    """The same text is compiled once."""
    compiled: list[str] = []

    class Counting(GrammarTokens):
        def compile(self, grammar: str):  # type: ignore[no-untyped-def]
            compiled.append(grammar)
            return GrammarTokens.compile(self, grammar)

    known = oracle_tokens()
    tokens = Counting(known.tokenizer, known.executor, known.eos_token_ids, known.eos_mask)
    compiler = GrammarCompiler(lambda: tokens, compile_timeout_s=GRAMMAR_TIMEOUT_S)
    for start in (0, 10):
        for seq_id in range(start, start + 10):
            compiler.submit(seq_id, schema_grammar(PERSON), ())
        assert len(take_all(compiler)) == 10
    assert len(compiled) == 1


def test_the_state_stands_where_the_emitted_tokens_lead() -> None:
    """A takeover goes on in the middle of the grammar, or finds it complete."""
    grammar = regex_grammar("abc[xy]z")
    output = tuple(TOKENS.index(text) for text in ("abc", "x"))
    state = compile_one(grammar, output)
    assert isinstance(state, GrammarState)
    assert state.accept(TOKENS.index("z"))
    over = compile_one(grammar, (*output, TOKENS.index("z")))
    assert isinstance(over, GrammarState)
    assert over.is_complete


def test_emitted_tokens_that_do_not_follow_the_grammar_are_a_fault_of_ours() -> None:
    """The request is not blamed for it."""
    refusal = compile_one(choice_grammar("ab"), (TOKENS.index("z"),))
    assert isinstance(refusal, GrammarRefusal)
    assert refusal.code == "engine_failure"
    assert "do not follow the grammar" in refusal.message


@pytest.mark.parametrize("grammar", [regex_grammar("("), "{", '{"grammars": 3}', "{}"])
def test_a_broken_grammar_is_refused_and_the_next_one_compiled(grammar: str) -> None:
    """Whatever comes, the compiler goes on (B49)."""
    compiler = make_compiler()
    compiler.submit(1, grammar, ())
    compiler.submit(2, choice_grammar("ab"), ())
    taken = take_all(compiler)
    assert isinstance(taken[1], GrammarRefusal)
    assert taken[1].code == "invalid_request"
    assert "grammar is invalid" in taken[1].message
    assert isinstance(taken[2], GrammarState)


def test_a_compile_over_the_bound_is_refused() -> None:
    """The message says how long it may take."""
    refusal = compile_one(slow_grammar(), compile_timeout_s=0.001)
    assert refusal == GrammarRefusal(
        "invalid_request", "compiling the grammar took more than 0.001 s"
    )


def test_slow_compiles_do_not_hold_up_the_next_ones_for_ever() -> None:
    """Those over the bound give their place away."""
    compiler = make_compiler(compile_timeout_s=0.2)
    for seq_id in range(2):  # as many as are compiled at once
        compiler.submit(seq_id, slow_grammar(seq_id), ())
    compiler.submit(9, choice_grammar("ab"), ())
    taken = take_all(compiler)
    assert isinstance(taken[9], GrammarState)
    assert all(isinstance(taken[seq_id], GrammarRefusal) for seq_id in range(2))


def test_a_grammar_that_is_known_does_not_wait_for_what_others_compile() -> None:
    """New schemas, however many, delay nobody who asks for an old one."""
    compiler = make_compiler()
    compiler.submit(1, choice_grammar("ab"), ())
    take_all(compiler)
    for seq_id in range(100, 104):
        compiler.submit(seq_id, slow_grammar(seq_id), ())
    compiler.submit(2, choice_grammar("ab"), ())
    assert 2 in dict(compiler.take())
    for seq_id in range(100, 104):
        compiler.cancel(seq_id)


def test_nothing_can_be_read_before_a_grammar_is_compiled() -> None:
    """So whoever sleeps on the compiler is woken once, for something."""
    with held_back() as (compiler, gate):
        compiler.submit(1, choice_grammar("ab"), ())
        assert not select.select([compiler], [], [], 0)[0]
        assert compiler.take() == []
        gate.set()
        assert list(take_all(compiler)) == [1]
        assert not select.select([compiler], [], [], 0)[0]


def test_a_cancelled_sequence_gets_nothing_and_its_neighbours_all() -> None:
    """Whether its grammar is being compiled, or waits for that (B36)."""
    with held_back() as (compiler, gate):
        for seq_id in range(6):
            compiler.submit(seq_id, choice_grammar("ab", f"the {seq_id // 2}"), ())
        for seq_id in (0, 4, 5, 77):
            compiler.cancel(seq_id)
        gate.set()
        assert sorted(take_all(compiler)) == [1, 2, 3]


def test_only_the_last_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, and a grammar that was dropped is compiled again."""
    monkeypatch.setattr("headrace_worker.engine.grammar_compiler._MOST_KEPT", 2)
    compiler = make_compiler()
    for seq_id in (1, 2, 3, 1):
        compiler.submit(seq_id, choice_grammar(f"{seq_id}"), ())
        assert isinstance(take_all(compiler)[seq_id], GrammarState)
    assert len(compiler._kept) == 2


def test_a_tokenizer_that_cannot_be_read_fails_each_request_with_the_reason() -> None:
    """And is tried again for the next one."""
    attempts: list[int] = []

    def load() -> GrammarTokens:
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("no such decoder")
        return oracle_tokens()

    compiler = GrammarCompiler(load, compile_timeout_s=GRAMMAR_TIMEOUT_S)
    compiler.submit(1, choice_grammar("ab"), ())
    refusal = take_all(compiler)[1]
    assert isinstance(refusal, GrammarRefusal)
    assert "tokenizer cannot be used with grammars: no such decoder" in refusal.message
    compiler.submit(2, choice_grammar("ab"), ())
    assert isinstance(take_all(compiler)[2], GrammarState)


def test_an_engine_compiles_with_the_tokenizer_that_its_settings_name(tmp_path: Path) -> None:
    """Read when the first grammar comes; without one there are no grammars."""
    assert make_grammars(EngineSettings(model="m")) is None
    file = tmp_path / "tokenizer.json"
    settings = EngineSettings(model="m", tokenizer_file=str(file), eos_token_ids=(EOS_ID,))
    compiler = make_grammars(settings)
    assert compiler is not None
    save_tokenizer(file)
    compiler.submit(1, choice_grammar("ab"), ())
    state = take_all(compiler)[1]
    assert isinstance(state, GrammarState)
    assert state.tokens.eos_token_ids == {EOS_ID}
