"""Stop strings: the match that ends first wins, and what was shown stays shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_worker.serving.stop_strings import StopScanner


def _stream(
    stop: tuple[str, ...], *pieces: str, include_stop: bool = False
) -> tuple[list[str], bool]:
    """Feed pieces until a match; return what was shown, the flushed tail last."""
    scanner, shown = StopScanner(stop, include_stop=include_stop), []
    for piece in pieces:
        scan = scanner.feed(piece)
        shown.append(scan.text)
        if scan.matched:
            return shown, True
    return [*shown, scanner.flush()], False


def _oracle(stop: tuple[str, ...], text: str, include_stop: bool) -> tuple[str, bool]:
    """Look at the whole text one end at a time, longest stop string first."""
    for end in range(1, len(text) + 1):
        for candidate in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(candidate):
                return text[: end if include_stop else end - len(candidate)], True
    return text, False


def test_without_stop_strings_text_passes_at_once() -> None:
    """Nothing is held back when nothing can stop."""
    assert _stream((), "abc", "", "d") == (["abc", "", "d", ""], False)


def test_a_stop_string_over_several_tokens_is_never_shown_in_part() -> None:
    """B05: "ABC", "DEF", "G", "HI", "J" with stop DEFGHIJ shows ABC alone."""
    shown, matched = _stream(("DEFGHIJ",), "ABC", "DEF", "G", "HI", "J")
    assert (shown, matched) == (["ABC", "", "", "", ""], True)


def test_the_beginning_of_a_stop_string_that_never_comes_is_flushed() -> None:
    """B05: an output that ends "DEFG" without a match shows it in the end."""
    shown, matched = _stream(("DEFGHIJ",), "ABC", "DEF", "G")
    assert (shown, matched) == (["ABC", "", "", "DEFG"], False)


def test_held_text_is_shown_once_it_cannot_become_a_stop_string() -> None:
    """Text waits no longer than it has to."""
    shown, matched = _stream(("DEFGHIJ",), "ABCDE", "X")
    assert (shown, matched) == (["ABC", "DEX", ""], False)


def test_a_stop_string_inside_a_larger_token_cuts_the_token() -> None:
    """B06: "a", "...b" with stop ".." shows "a"."""
    assert _stream(("..",), "a", "...b") == (["a", ""], True)


def test_with_include_stop_the_output_ends_with_the_stop_string() -> None:
    """B06: "a", "...b" with stop ".." shows "a..", and nothing behind it."""
    assert _stream(("..",), "a", "...b", include_stop=True) == (["a", ".."], True)


def test_an_included_stop_string_over_several_tokens_is_shown_when_it_is_whole() -> None:
    """Until then it could have been ordinary text that goes on."""
    shown, matched = _stream(("DEFGHIJ",), "ABCDEF", "GHI", "JK", include_stop=True)
    assert (shown, matched) == (["ABC", "", "DEFGHIJ"], True)


@pytest.mark.parametrize("pieces", [("wxyz",), ("w", "x", "y", "z"), ("wx", "yz")])
def test_the_earliest_end_wins(pieces: tuple[str, ...]) -> None:
    """B06: with stop strings xyz and y, "wxyz" ends before the y, however it is split."""
    shown, matched = _stream(("xyz", "y"), *pieces)
    assert ("".join(shown), matched) == ("wx", True)


def test_of_two_that_end_together_the_longer_wins() -> None:
    """The output ends before the longest stop string, so no part of one is shown."""
    assert _stream(("z", "xyz"), "w", "x", "y", "z") == (["w", "", "", ""], True)


def test_a_shorter_stop_string_ends_inside_a_longer_one() -> None:
    """Waiting for the longer one does not hide the shorter."""
    shown, matched = _stream(("abcd", "bc"), "a", "b", "c", "d")
    assert ("".join(shown), matched) == ("a", True)


def test_repetitions_overlap() -> None:
    """A tail that repeats keeps as much as can still match."""
    shown, matched = _stream(("aab",), "a", "a", "a", "b")
    assert ("".join(shown), matched) == ("a", True)


def test_a_match_that_may_not_stop_is_ordinary_text() -> None:
    """B07: before min_tokens a stop string is shown, and the next one stops."""
    scanner = StopScanner(("END",))
    early = scanner.feed("x END y", may_stop=False)
    late = scanner.feed(" END")
    assert (early.text, early.matched) == ("x END y", False)
    assert (late.text, late.matched) == (" ", True)


def test_a_match_may_begin_where_stopping_was_not_allowed() -> None:
    """What counts is where a stop string ends."""
    scanner = StopScanner(("END",))
    assert scanner.feed("x EN", may_stop=False).text == "x "
    scan = scanner.feed("D")
    assert (scan.text, scan.matched) == ("", True)


def test_a_match_that_was_let_pass_is_not_found_again() -> None:
    """Text whose stop was not allowed does not stop the output later."""
    scanner = StopScanner(("aa",))
    assert scanner.feed("aa", may_stop=False).text == "a"
    assert not scanner.feed("b").matched


def test_flushing_empties_the_scanner() -> None:
    """The tail is given out once."""
    scanner = StopScanner(("END",))
    scanner.feed("EN")
    assert (scanner.flush(), scanner.flush()) == ("EN", "")


_TEXTS = st.text("ab", max_size=12)
_STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


@given(_STOPS, st.lists(st.text("ab", max_size=4), max_size=8), st.booleans())
def test_pieces_do_not_matter(stop: tuple[str, ...], pieces: list[str], include_stop: bool) -> None:
    """However text is split, the output is that of looking at the whole of it."""
    shown, matched = _stream(stop, *pieces, include_stop=include_stop)
    assert ("".join(shown), matched) == _oracle(stop, "".join(pieces), include_stop)


@given(_STOPS, _TEXTS)
def test_no_more_is_held_than_the_longest_stop_string_but_one(
    stop: tuple[str, ...], text: str
) -> None:
    """What is held back is bounded, so an answer streams."""
    scanner, shown = StopScanner(stop), ""
    for index, character in enumerate(text):
        scan = scanner.feed(character)
        shown += scan.text
        if scan.matched:
            return
        assert index + 1 - len(shown) <= max(map(len, stop)) - 1
