"""One scripted answer: its tokens, its chunks, its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.errors import ErrorCode, error_for
from headrace.fake_sequence import FakeSequence, prompt_text, split_text, token_id
from headrace.functions import Grant
from headrace.keys import Keys
from headrace.protocol import RequestMessage, TerminalMessage, decode_chunk, decode_terminal
from headrace.sampling import SamplingParams
from headrace.types import FinishReason, TokenLogprob


def sequence(num_tokens: int = 0) -> FakeSequence:
    """Return a sequence of a grant that begins after so many tokens."""
    grant = Grant("t", "r1", 1, num_tokens, b"", 10, 5, 0, True, 1000, None, 1500)
    return FakeSequence(grant, "w1")


def request(prompt: str = "Hi", **sampling: object) -> RequestMessage:
    """Return a request."""
    return RequestMessage("r1", "t", SamplingParams(**sampling), prompt=prompt)  # type: ignore[arg-type]


def said(seq: FakeSequence) -> list[str]:
    """Take every chunk of a sequence and return its text."""
    texts = []
    while not seq.is_done:
        texts += decode_chunk(seq.next_item().entry).pieces
        seq.num_emitted += 1
    return texts


def end(seq: FakeSequence) -> TerminalMessage:
    """Return the terminal entry that a sequence ends with."""
    terminal = seq.finish_call(Keys("q")).args[6]
    assert isinstance(terminal, bytes)
    return decode_terminal(terminal)


@pytest.mark.parametrize(
    ("text", "words"),
    [("to be", ["to", " be"]), ("  a\nb ", ["  a", "\nb", " "]), ("", []), (" ", [" "])],
)
def test_words_keep_the_space_before_them(text: str, words: list[str]) -> None:
    """Joined again, the words are the text."""
    assert split_text(text, "words") == words
    assert "".join(words) == text


def test_token_ids_are_stable() -> None:
    """A character's id is its code point, a word's a checksum, the same in every process."""
    assert token_id("é") == 233
    assert token_id("hello") == 907060870
    assert 0 <= token_id("any word at all") < 2**31


def test_answer_is_said_token_by_token() -> None:
    """Each chunk is one token at its offset."""
    seq = sequence()
    seq.answer(request(), "abc", "characters")
    assert said(seq) == ["a", "b", "c"]
    assert end(seq).finish_reason is FinishReason.STOP


def test_answer_stops_at_max_tokens() -> None:
    """An answer that is too long is cut, and says so."""
    seq = sequence()
    seq.answer(request(max_tokens=2), "abc", "characters")
    assert said(seq) == ["a", "b"]
    assert end(seq).finish_reason is FinishReason.LENGTH


def test_answer_goes_on_after_a_takeover() -> None:
    """What an earlier holder has said is not said again."""
    seq = sequence(num_tokens=2)
    seq.answer(request(), "abc", "characters")
    assert seq.next_item().offset == 2
    assert said(seq) == ["c"]


def test_end_counts_tokens_and_time() -> None:
    """Usage and timings are those of the answer; queue time comes from Redis's clock."""
    seq = sequence()
    seq.answer(request("four"), "abc", "characters")
    said(seq)
    terminal = end(seq)
    assert terminal.usage is not None
    assert (terminal.usage.prompt_tokens, terminal.usage.completion_tokens) == (4, 3)
    assert terminal.timings is not None
    assert terminal.timings.queue_s == 0.5


def test_refusal_and_cancellation_end_at_once() -> None:
    """Both leave nothing to say, and carry their code."""
    refused, cancelled = sequence(), sequence()
    for seq in (refused, cancelled):
        seq.answer(request(), "abc", "characters")
    refused.refuse(error_for(ErrorCode.UNKNOWN_MODEL, "no"))
    cancelled.cancel()
    assert refused.is_done
    assert end(refused).error_code is ErrorCode.UNKNOWN_MODEL
    assert end(cancelled).finish_reason is FinishReason.CANCELLED


def test_prompt_is_known_in_each_of_its_forms() -> None:
    """Text, token ids, and the last of several messages."""
    assert prompt_text(request("Hi")) == "Hi"
    by_ids = RequestMessage("r1", "t", SamplingParams(), prompt=(72, 105))
    assert prompt_text(by_ids) == "Hi"
    messages = ({"role": "system", "content": "Be nice"}, {"role": "user", "content": "Hi"})
    assert prompt_text(RequestMessage("r1", "t", SamplingParams(), messages=messages)) == "Hi"
    parts = ({"role": "user", "content": [{"type": "text", "text": "H"}, {"text": "i"}]},)
    assert prompt_text(RequestMessage("r1", "t", SamplingParams(), messages=parts)) == "Hi"


def test_prompt_is_echoed_before_the_first_token() -> None:
    """The text begins with the prompt's, once, and the tokens are those of the answer."""
    seq = sequence()
    seq.answer(request("Hi", echo=True), "yes", "characters")
    assert said(seq) == ["Hiy", "e", "s"]
    assert end(seq).text == ""


def test_prompt_is_not_echoed_again_after_a_takeover() -> None:
    """Who goes on in the middle says no prompt, as the one before has said it."""
    seq = sequence(num_tokens=1)
    seq.answer(request("Hi", echo=True), "yes", "characters")
    assert said(seq) == ["e", "s"]
    assert end(seq).text == ""


def test_prompt_is_echoed_when_nothing_follows() -> None:
    """An answer without tokens still has the prompt as its text."""
    seq = sequence()
    seq.answer(request("Hi", echo=True), "", "characters")
    assert end(seq).text == "Hi"


def test_prompt_tokens_are_certain() -> None:
    """Each prompt token but the first has a logprob, if they were asked for."""
    seq = sequence()
    seq.answer(request("Hi", prompt_logprobs=0), "y", "characters")
    said(seq)
    assert end(seq).prompt_logprobs == (None, TokenLogprob(ord("i"), 0.0))


def test_a_refusal_says_nothing_of_the_prompt() -> None:
    """An error has no text and no logprobs."""
    seq = sequence()
    seq.answer(request("Hi", prompt_logprobs=0, echo=True), "y", "characters")
    seq.refuse(error_for(ErrorCode.INVALID_REQUEST, "no"))
    assert (end(seq).text, end(seq).prompt_logprobs) == ("", None)


@pytest.mark.parametrize("reason", [FinishReason.STOPPED_EARLY, FinishReason.DEADLINE])
def test_an_early_end_keeps_what_was_said(reason: FinishReason) -> None:
    """No further token comes, the count is that of the tokens, and it is no error."""
    seq = sequence()
    seq.answer(request(), "abcdef", "characters")
    seq.num_emitted = 2
    seq.stop_early(reason)
    terminal = end(seq)
    assert seq.is_done
    assert (terminal.finish_reason, terminal.error_code) == (reason, None)
    assert terminal.usage is not None
    assert terminal.usage.completion_tokens == 2


def test_a_deadline_counts_from_the_clock_of_redis() -> None:
    """What was over at the grant is overdue, whatever this machine's clock says."""
    assert not sequence().is_overdue
    late = replace(sequence().grant, deadline_ms=1500)
    assert FakeSequence(late, "w1").is_overdue
    assert not FakeSequence(replace(late, deadline_ms=90_000), "w1").is_overdue
