"""Tokens become text byte for byte: no character is broken, lost, doubled or taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_worker.serving.detokenizer import Detokenizer
from headrace_worker.serving.tokenizer import Tokenizer
from support.tokenizers import (
    EOS_ID,
    PAD_ID,
    byte_ids,
    byte_level_backend,
    byte_level_tokenizer,
    sentence_piece_tokenizer,
)

BYTE_LEVEL = byte_level_tokenizer()
SENTENCE_PIECE = sentence_piece_tokenizer()
both = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE], ids=["bytes", "pieces"])


def _pieces(tokenizer: Tokenizer, token_ids: Iterable[int]) -> list[str]:
    """Return the pieces of an output, its tail last."""
    detokenizer = Detokenizer(tokenizer.token_bytes)
    return [*(detokenizer.append(i).text for i in token_ids), detokenizer.finish()]


def _scripted(*pieces: str) -> Callable[[int], bytes]:
    """Return token bytes for a vocabulary of just these pieces."""
    return lambda token_id: pieces[token_id].encode()


@both
def test_characters_split_over_tokens_come_out_whole(tokenizer: Tokenizer) -> None:
    """B02: CJK and emoji, one byte a token, stream without a U+FFFD."""
    text = "客单价 🌶 é"
    pieces = _pieces(tokenizer, byte_ids(tokenizer, text.encode()))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


@both
def test_a_character_comes_with_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    """Bytes wait for their character and no longer."""
    assert _pieces(tokenizer, byte_ids(tokenizer, "é🌶".encode())) == ["", "é", "", "", "", "🌶", ""]


@both
def test_an_invalid_byte_does_not_end_the_stream(tokenizer: Tokenizer) -> None:
    """B03: 0xC3, then "abc", is U+FFFD and "abc"."""
    token_ids = byte_ids(tokenizer, b"\xc3abc")
    assert "".join(_pieces(tokenizer, token_ids)) == "\ufffdabc" == tokenizer.decode(token_ids)


@both
def test_an_incomplete_character_at_the_end_is_one_replacement(tokenizer: Tokenizer) -> None:
    """B04: "hi" and three bytes of a pepper are "hi" and one U+FFFD, streamed or not."""
    token_ids = byte_ids(tokenizer, b"hi" + "🌶".encode()[:3])
    pieces = _pieces(tokenizer, token_ids)
    assert pieces == ["h", "i", "", "", "", "\ufffd"]
    assert "".join(pieces) == tokenizer.decode(token_ids)


def test_spaces_of_sentence_piece_are_kept() -> None:
    """B08: "▁Hello", "▁world" after a prompt is " Hello world", its first space included."""
    backend = SENTENCE_PIECE.encode("Say Hello world")
    hello, world = backend[-2:]
    assert _pieces(SENTENCE_PIECE, [hello, world]) == [" Hello", " world", ""]
    assert SENTENCE_PIECE.decode([hello, world]) == " Hello world"


@both
def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    """Special tokens add nothing, wherever they stand, even inside a character."""
    first, second = byte_ids(tokenizer, "é".encode())
    assert "".join(_pieces(tokenizer, [PAD_ID, first, PAD_ID, second, EOS_ID])) == "é"


@both
def test_an_unknown_id_is_no_text(tokenizer: Tokenizer) -> None:
    """A padded row of the model's head has no token, and breaks nothing."""
    assert _pieces(tokenizer, [tokenizer.vocab_size + 7]) == ["", ""]


@both
@given(data=st.data())
def test_pieces_joined_are_the_text_of_all_tokens(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Whatever ids are sampled, streaming them gives what decoding them at once gives."""
    ids = st.integers(min_value=0, max_value=tokenizer.vocab_size - 1)
    token_ids = data.draw(st.lists(ids, max_size=30))
    assert "".join(_pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@given(st.lists(st.integers(min_value=0, max_value=BYTE_LEVEL.vocab_size - 1), max_size=30))
def test_byte_level_text_is_that_of_the_library(token_ids: list[int]) -> None:
    """For byte-level BPE even invalid bytes decode as the library decodes them."""
    expected = byte_level_backend().decode(token_ids, skip_special_tokens=True)
    assert BYTE_LEVEL.decode(token_ids) == expected


@both
@given(text=st.text(max_size=20))
def test_text_survives_the_way_through_tokens(tokenizer: Tokenizer, text: str) -> None:
    """A streamed answer that spells out a text is that text."""
    assert "".join(_pieces(tokenizer, byte_ids(tokenizer, text.encode()))) == text


def test_a_stop_string_ends_the_output_before_it() -> None:
    """The piece that completes a stop string says so, and later tokens add nothing."""
    detokenizer = Detokenizer(_scripted("ABC", "DEF", "G", "HI", "J", "more"), ("DEFGHIJ",))
    pieces = [detokenizer.append(token_id) for token_id in range(6)]
    assert [piece.text for piece in pieces] == ["ABC", "", "", "", "", ""]
    assert [piece.stopped for piece in pieces] == [False, False, False, False, True, True]
    assert (detokenizer.finish(), detokenizer.num_tokens) == ("", 5)


def test_a_stop_string_of_split_characters_is_found() -> None:
    """Stop strings are compared as text, after characters are whole."""
    detokenizer = Detokenizer(BYTE_LEVEL.token_bytes, ("🌶é",))
    stopped = [detokenizer.append(i).stopped for i in byte_ids(BYTE_LEVEL, "a🌶é".encode())]
    assert stopped == [False] * 6 + [True]


def test_no_stop_string_counts_before_min_tokens() -> None:
    """B07: with min_tokens 5, stop strings at tokens 2 and 7 stop at 7."""
    detokenizer = Detokenizer(_scripted("a", "STOP"), ("STOP",), min_tokens=5)
    stopped = [detokenizer.append(i).stopped for i in (0, 1, 0, 0, 0, 0, 1)]
    assert stopped == [False] * 6 + [True]


def test_the_token_that_reaches_min_tokens_may_stop() -> None:
    """min_tokens is a number of tokens that the output has, the last one included."""
    detokenizer = Detokenizer(_scripted("a", "STOP"), ("STOP",), min_tokens=2)
    assert [detokenizer.append(i).stopped for i in (0, 1)] == [False, True]


def test_both_kinds_of_held_text_are_flushed_in_order() -> None:
    """The beginning of a stop string and an incomplete character come out at the end, once."""
    detokenizer = Detokenizer(BYTE_LEVEL.token_bytes, ("DEFG",))
    for token_id in byte_ids(BYTE_LEVEL, b"DE\xc3"):
        assert detokenizer.append(token_id).text == ""
    assert (detokenizer.finish(), detokenizer.finish()) == ("DE\ufffd", "")


def test_an_included_stop_string_is_the_end_of_the_text() -> None:
    """The text ends with the stop string, whatever else its token holds; the tail is empty."""
    detokenizer = Detokenizer(_scripted("a", "...b"), ("..",), include_stop=True)
    assert [detokenizer.append(i).text for i in (0, 1)] == ["a", ".."]
    assert detokenizer.finish() == ""


def test_a_silent_token_adds_nothing_and_completes_no_stop_string() -> None:
    """It ends the output for another reason; what was held back before it comes out."""
    detokenizer = Detokenizer(_scripted("aST", "OP"), ("STOP",), silent_ids={1})
    assert [detokenizer.append(i).text for i in (0, 1)] == ["a", ""]
    assert (detokenizer.stopped, detokenizer.finish()) == (False, "ST")


def test_an_echo_goes_before_the_first_piece() -> None:
    """It comes with the first token, also when that has no text of its own, and only then."""
    first, second = byte_ids(BYTE_LEVEL, "é".encode())
    detokenizer = Detokenizer(BYTE_LEVEL.token_bytes, echo="Say: ")
    assert [detokenizer.append(i).text for i in (first, second, first)] == ["Say: ", "é", ""]


def test_stop_strings_do_not_look_at_the_echo() -> None:
    """A stop string in the prompt, or one that begins there, stops nothing."""
    detokenizer = Detokenizer(_scripted("D", "x"), ("END",), echo="END EN")
    assert [detokenizer.append(i).text for i in (0, 1)] == ["END END", "x"]
    assert not detokenizer.stopped


def test_a_first_token_that_completes_a_stop_string_still_brings_the_echo() -> None:
    """The text is the prompt's alone, and the output is over."""
    piece = Detokenizer(_scripted("STOP"), ("STOP",), echo="Say: ").append(0)
    assert (piece.text, piece.stopped) == ("Say: ", True)


def test_an_output_without_tokens_is_the_echo_alone() -> None:
    """A form may be complete before the first token; the echo is told once."""
    detokenizer = Detokenizer(_scripted(), echo="Say: ")
    assert (detokenizer.finish(), detokenizer.finish()) == ("Say: ", "")


@given(
    token_ids=st.lists(st.integers(min_value=0, max_value=3), max_size=20),
    cut=st.integers(min_value=0, max_value=20),
    min_tokens=st.integers(min_value=0, max_value=6),
    options=st.fixed_dictionaries({"include_stop": st.booleans(), "echo": st.text("ab")}),
)
def test_a_takeover_goes_on_where_the_text_was(
    token_ids: list[int], cut: int, min_tokens: int, options: dict[str, Any]
) -> None:
    """Replaying the emitted tokens gives the same pieces, so what was shown stays shown."""
    texts = _scripted("a", "b", "ab", "ba")
    one = Detokenizer(texts, ("abba", "aab"), min_tokens, **options)
    shown = [one.append(token_id) for token_id in token_ids]
    two = Detokenizer(texts, ("abba", "aab"), min_tokens, **options)
    assert [two.append(token_id) for token_id in token_ids[:cut]] == shown[:cut]
    assert [two.append(token_id) for token_id in token_ids[cut:]] == shown[cut:]
    assert two.finish() == one.finish()
