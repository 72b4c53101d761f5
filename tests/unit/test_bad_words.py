"""Bad words become every run of ids that spells them, or a "no" that names the word."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers

from headrace.errors import InvalidRequest
from headrace_worker.serving import bad_words
from headrace_worker.serving.bad_words import spell_words
from headrace_worker.serving.tokenizer import Tokenizer, TokenizerConfig
from support.tokenizers import (
    EOS_ID,
    byte_ids,
    byte_level_backend,
    byte_level_tokenizer,
    sentence_piece_tokenizer,
)

BYTE_LEVEL = byte_level_tokenizer()
SENTENCE_PIECE = sentence_piece_tokenizer()
VOCAB_SIZE = 1000  # beyond all ids


both = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE], ids=["bytes", "pieces"])


@both
@pytest.mark.parametrize("word", ["text", "ABC", "zz", "客", "🌶", "two words", "x"])
@pytest.mark.parametrize("before", ["", " ", "a ", "\n", "(", "  "])
def test_a_word_is_banned_wherever_it_stands(tokenizer: Tokenizer, word: str, before: str) -> None:
    """At the start, behind a space, a letter or a line's end: its last ids are one of the runs."""
    token_ids = tokenizer.encode_plain(before + word)
    runs = spell_words((word,), tokenizer, VOCAB_SIZE)
    assert any(token_ids[-len(run) :] == run for run in runs)


@both
def test_every_run_spells_its_word(tokenizer: Tokenizer) -> None:
    """Nothing is banned but the word, with a space before it or without."""
    for word in ("text", "ABC", "zz", "客", "Hello", "two words"):
        spelled = {tokenizer.decode(run) for run in spell_words((word,), tokenizer, VOCAB_SIZE)}
        assert spelled <= {word, f" {word}"}


def test_a_word_that_is_one_token_is_banned_as_that() -> None:
    """A token whose text is the word is one of its runs."""
    backend = byte_level_backend()
    backend.add_tokens(["zzz"])
    tokenizer = Tokenizer(backend, TokenizerConfig())
    singles = tokenizer.tokens_of(b"zzz")
    assert len(singles) == 1
    assert singles in spell_words(("zzz",), tokenizer, VOCAB_SIZE)


def test_a_run_that_ends_with_another_is_left_out() -> None:
    """Whoever bans a token bans it behind a space, too."""
    (token_id,) = BYTE_LEVEL.tokens_of(b"ABC")
    assert spell_words(("ABC",), BYTE_LEVEL, VOCAB_SIZE) == ((token_id,),)


def test_a_leading_space_makes_no_other_word() -> None:
    """As in vLLM, a word given with its space is the same word."""
    with_space, without = (
        set(spell_words((word,), BYTE_LEVEL, VOCAB_SIZE)) for word in (" text", "text")
    )
    assert with_space == without


def test_a_word_given_twice_is_one_word() -> None:
    """Runs are told once, in the order of the words."""
    once = spell_words(("ABC", "zz"), BYTE_LEVEL, VOCAB_SIZE)
    assert spell_words(("ABC", "zz", "ABC"), BYTE_LEVEL, VOCAB_SIZE) == once
    assert BYTE_LEVEL.decode(once[0]) == "ABC"


def test_a_newline_can_be_banned() -> None:
    """Only spaces are stripped from a word."""
    newline = tuple(byte_ids(BYTE_LEVEL, b"\n"))
    assert newline in spell_words(("\n",), BYTE_LEVEL, VOCAB_SIZE)


def test_a_special_token_is_banned_by_its_name() -> None:
    """Its text in a list of bad words means the token, as in a prompt."""
    assert (EOS_ID,) in spell_words(("</s>",), BYTE_LEVEL, VOCAB_SIZE)


@pytest.mark.parametrize("word", ["", " ", "   "])
def test_an_empty_word_is_refused_by_name(word: str) -> None:
    """Nothing but spaces is no word; it would ban every token."""
    with pytest.raises(InvalidRequest, match=f"bad_words holds '{word}', .* nothing but spaces"):
        spell_words((word,), BYTE_LEVEL, VOCAB_SIZE)


def test_a_word_that_the_tokens_cannot_spell_is_refused_by_name() -> None:
    """An unknown word would ban the unknown token in its place."""
    backend = Backend(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer = Tokenizer(backend, TokenizerConfig())
    assert spell_words(("a",), tokenizer, VOCAB_SIZE) == ((0,),)
    with pytest.raises(InvalidRequest, match="bad_words holds 'b', which this model's tokens"):
        spell_words(("a", "b"), tokenizer, VOCAB_SIZE)


def test_a_word_that_the_tokenizer_writes_in_another_way_is_refused_by_name() -> None:
    """A tokenizer that knows lower case alone never says the word, and bans no other for it."""
    backend = byte_level_backend()
    backend.normalizer = normalizers.Lowercase()
    tokenizer = Tokenizer(backend, TokenizerConfig())
    with pytest.raises(InvalidRequest, match="'Zz'"):
        spell_words(("Zz",), tokenizer, VOCAB_SIZE)


def test_ids_that_are_never_sampled_need_no_ban() -> None:
    """A tokenizer with more tokens than its model's head spells words with the others."""
    (token_id,) = BYTE_LEVEL.tokens_of(b"ABC")
    assert spell_words(("ABC",), BYTE_LEVEL, token_id) == ()
    assert spell_words(("ABC",), BYTE_LEVEL, token_id + 1) == ((token_id,),)


def test_runs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many ids are refused with both numbers."""
    monkeypatch.setattr(bad_words, "MAX_RUN_IDS", 6)
    assert len(spell_words(("zzzzzz",), BYTE_LEVEL, VOCAB_SIZE)) == 1
    with pytest.raises(InvalidRequest, match=r"7 token ids, at most 6"):
        spell_words(("zzzzzzz",), BYTE_LEVEL, VOCAB_SIZE)
