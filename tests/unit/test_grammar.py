"""A grammar's state tells which tokens may come next, and when nothing may."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from time import thread_time

import pytest
import torch

from headrace_worker.engine.draw import Draw, _Rows, draw_tokens
from headrace_worker.engine.grammar import GrammarState, GrammarTokens
from headrace_worker.engine.grammar_mask import mask_by_grammar, next_token_masks
from headrace_worker.serving.response_format import make_grammar
from headrace_worker.serving.tokenizer import Tokenizer
from support import tokenizers as tiny
from support.grammars import (
    EOS_ID,
    PERSON,
    TOKENS,
    choice_grammar,
    oracle_tokens,
    regex_grammar,
    schema_grammar,
    text_of,
)
from support.oracle import VOCAB_SIZE

INF = float("inf")


def begin(grammar: str) -> GrammarState:
    """Return the state before the first token."""
    return GrammarState(oracle_tokens(), oracle_tokens().compile(grammar))


def advance(state: GrammarState, text: str) -> GrammarState:
    """Take a text in, a character a token."""
    for character in text:
        assert state.accept(TOKENS.index(character))
    return state


def allowed(*states: GrammarState) -> list[set[str]]:
    """Return for each state the tokens that its row keeps."""
    logits = torch.zeros(len(states), VOCAB_SIZE)
    mask_by_grammar(logits, states)
    return [{TOKENS[i] for i in (row == 0).nonzero().flatten().tolist()} for row in logits]


def wander(state: GrammarState, random: Random) -> list[int]:
    """Take random tokens that the mask allows, to the end."""
    token_ids: list[int] = []
    while not state.is_complete and len(token_ids) < 200:
        (texts,) = allowed(state)
        token_ids.append(TOKENS.index(random.choice(sorted(texts))))
        assert state.accept(token_ids[-1])
    return token_ids


def test_only_tokens_that_go_on_in_the_grammar_are_allowed() -> None:
    """Whole tokens are judged, also those that reach over several parts."""
    state = begin(regex_grammar("[ab][a-c]{1,2}|[0-9]"))
    assert allowed(state) == [{"a", "b", "ab", "abc", *"0123456789"}]
    assert allowed(advance(state, "a")) == [{"a", "b", "c", "ab"}]


def test_the_end_is_allowed_exactly_where_the_grammar_may_end() -> None:
    """After "x" the regex x(y|z)* may end, before it may not."""
    state = begin(regex_grammar("x(y|z)*"))
    assert "</s>" not in allowed(state)[0]
    assert {"</s>", "y", "z"} <= allowed(advance(state, "x"))[0]


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (regex_grammar("[a-z]{3}"), "xyz"),
        (regex_grammar(""), ""),
        (choice_grammar("in", "the end"), "in"),
        (schema_grammar(PERSON), '{"name":"zoe","age":7}'),
        (schema_grammar({"const": [1, 2]}), "[1,2]"),
        (regex_grammar("abé?"), "ab"),  # no token of the oracle goes on
    ],
    ids=["regex", "empty", "choice", "object", "const", "unspeakable"],
)
def test_a_grammar_is_complete_when_only_the_end_is_left(grammar: str, text: str) -> None:
    """It is said with the last token, not one later, and not before."""
    state = begin(grammar)
    for character in text:
        assert not state.is_complete
        advance(state, character)
    assert state.is_complete
    assert allowed(state) == [{"</s>"}]


def test_a_grammar_that_may_go_on_is_not_complete_until_the_end_is_said() -> None:
    """An end-of-sequence token completes it."""
    state = advance(begin(regex_grammar("[ab]*")), "ab")
    assert not state.is_complete
    assert state.accept(EOS_ID)
    assert state.is_complete


def test_every_token_that_fits_is_allowed_also_where_only_one_text_is_left() -> None:
    """The model chooses how it spells a text; the tokenizer's spelling is not forced on it."""
    assert allowed(begin(choice_grammar("true"))) == [{"t", "tr", "tru", "true"}]
    assert allowed(begin(schema_grammar({"const": {"a": 1}}))) == [{"{", '{"'}]


def test_the_options_of_a_response_format_are_held_to() -> None:
    """At most one space between the parts of JSON, as serving asks for it."""
    form = {"type": "json_schema", "json_schema": {"schema": {"const": {"a": 1}}}}
    grammar = make_grammar(form)
    for text in ('{"a":1}', '{"a": 1}', '{ "a": 1 }'):
        assert advance(begin(grammar), text).is_complete
    assert " " not in allowed(advance(begin(grammar), '{"a": '))[0]


def test_a_long_text_without_a_choice_takes_no_longer_than_another() -> None:
    """A quarter of a million characters that must come do not hold up every step."""

    def walk_s(regex: str) -> float:
        state, started_s = begin(regex_grammar(regex)), thread_time()
        for _ in range(20):
            assert allowed(state) == [{"a"}]
            advance(state, "a")
        return thread_time() - started_s

    long_s = min(walk_s("(a{500}){500}") for _ in range(3))
    short_s = min(walk_s("a{30}") for _ in range(3))
    assert long_s < 20 * short_s  # it is hundreds of times where the text is looked for


@pytest.mark.parametrize("seed", range(20))
def test_any_walk_through_the_masks_is_an_instance_of_the_schema(seed: int) -> None:
    """Whatever is drawn, the text parses and has the fields."""
    token_ids = wander(begin(schema_grammar(PERSON)), Random(seed))
    person = json.loads(text_of(token_ids))
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 6
    assert 0 <= person["age"] <= 150
    assert set(person) <= {"name", "age", "wise"}


@pytest.mark.parametrize("seed", range(20))
def test_any_walk_through_the_masks_matches_the_regex(seed: int) -> None:
    """As a whole, not in part."""
    regex = r"(true|[0-9]{2,4}) [a-f]+(-[a-z]{1,3})?\."
    text = text_of(wander(begin(regex_grammar(regex)), Random(seed)))
    assert re.fullmatch(regex, text)


def test_a_token_that_does_not_fit_is_refused_with_the_reason() -> None:
    """The state says so, and its row keeps nothing."""
    state = begin(regex_grammar("ab"))
    assert not state.accept(TOKENS.index("z"))
    assert "doesn't satisfy the grammar" in (state.error or "")
    assert allowed(state) == [set()]


def test_a_dead_end_of_the_vocabulary_is_an_error() -> None:
    """The grammar wants a character that no token has."""
    state = advance(begin(regex_grammar("abé")), "ab")
    assert not state.is_complete
    assert allowed(state) == [set()]
    assert state.error == "no token of this model fits"


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (regex_grammar("("), "unclosed group"),
        (schema_grammar({"type": "nope"}), "Invalid type: nope"),
        (schema_grammar({"allOf": [{"type": "string"}, {"type": "integer"}]}), "Unsatisfiable"),
        ("start: missing", 'unknown name: "missing"'),
        ("", "no start rule"),
        (regex_grammar("éa"), "no token of this model fits"),
    ],
)
def test_an_invalid_grammar_is_named_in_one_line(grammar: str, reason: str) -> None:
    """The reason is for the one who sent it; nothing of the library's state is in it."""
    with pytest.raises(ValueError, match=reason) as caught:
        oracle_tokens().compile(grammar)
    assert "\n" not in str(caught.value)


def test_masks_of_many_are_those_of_each_alone() -> None:
    """Computed together or one by one, known before or not."""
    random = Random(3)
    states = [begin(schema_grammar(PERSON)) for _ in range(9)]
    states.append(advance(begin(regex_grammar("[ab]*")), "ab"))
    for steps, state in enumerate(states[:9]):
        for _ in range(steps):
            state.accept(TOKENS.index(random.choice(sorted(allowed(state)[0]))))
    together = next_token_masks(states)
    assert torch.equal(together, torch.cat([next_token_masks([state]) for state in states]))


def test_rows_without_a_grammar_are_not_touched() -> None:
    """Their bits stay, and so do logits that are kept."""
    logits = torch.randn(3, VOCAB_SIZE)
    before = logits.clone()
    mask_by_grammar(logits, [None, begin(choice_grammar("ab")), None])
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    kept = logits[1] > -INF
    assert 0 < int(kept.sum()) < VOCAB_SIZE
    assert torch.equal(logits[1][kept], before[1][kept])


@pytest.mark.parametrize("draw", [Draw(0.4, top_k=50), Draw(0.9, top_p=0.9), Draw(0.7, top_k=9)])
def test_a_draw_from_few_tokens_does_not_sort_the_whole_vocabulary(
    draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masked tokens fill up the candidates, and are no reason to look for more of them."""
    logits = torch.full((1, 5000), -INF)
    logits[0, [7, 300, 4000]] = torch.tensor([0.5, 0.1, 0.3])
    looked_at: list[int] = []
    most_likely = _Rows._most_likely

    def look(rows: _Rows, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        looked_at.append(count)
        return most_likely(rows, count)

    monkeypatch.setattr(_Rows, "_most_likely", look)
    few = draw_tokens(logits, {0: draw})[0]
    assert len(looked_at) == 1
    assert few in (7, 300, 4000)
    assert few == _Rows(logits, [draw]).draw(5000)[0]


@pytest.mark.parametrize("width", [VOCAB_SIZE - 20, VOCAB_SIZE + 20])
def test_a_row_may_be_wider_or_narrower_than_the_tokenizer(width: int) -> None:
    """What the tokenizer does not know is never allowed."""
    logits = torch.zeros(1, width)
    mask_by_grammar(logits, [begin(regex_grammar("[a-z0-9]+"))])
    kept = (logits[0] == 0).nonzero().flatten().tolist()
    (texts,) = allowed(begin(regex_grammar("[a-z0-9]+")))
    assert {TOKENS[i] for i in kept} == {t for t in texts if TOKENS.index(t) < width}


@pytest.mark.parametrize("family", ["byte_level", "sentence_piece"])
def test_a_grammar_sees_the_bytes_that_the_reader_gets(family: str, tmp_path: Path) -> None:
    """Each token means to the grammar what the detokenizer writes for it."""
    make = tiny.byte_level_backend if family == "byte_level" else tiny.sentence_piece_backend
    make().save(str(tmp_path / "tokenizer.json"))
    known = GrammarTokens.load(str(tmp_path / "tokenizer.json"), [tiny.EOS_ID])
    tokenizer = Tokenizer(make(), tiny.CONFIG)
    for token_id in range(tokenizer.vocab_size):
        said = tokenizer.token_bytes(token_id)
        if said != b"\xff":  # the library's mark of a special token, and in no text
            assert known.tokenizer.decode_bytes([token_id]) == said or tokenizer.is_special(
                token_id
            )


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """So the operator sees which file."""
    with pytest.raises(ValueError, match=r"missing\.json"):
        GrammarTokens.load(str(tmp_path / "missing.json"), [EOS_ID])


def test_without_configured_ends_the_tokenizers_own_counts(tmp_path: Path) -> None:
    """A grammar needs something to end with."""
    tiny.byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    known = GrammarTokens.load(str(tmp_path / "tokenizer.json"), [])
    assert known.eos_token_ids == {tiny.EOS_ID}
