"""The options beyond sampling: what they become, what is refused, and what survives a takeover."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.errors import ErrorCode, InvalidRequest
from headrace.protocol import ChunkMessage
from headrace.types import FinishReason
from headrace_worker.serving import intake as intake_module
from headrace_worker.serving.bad_words import spell_words
from headrace_worker.serving.intake import Intake, PreparedRequest
from headrace_worker.serving.response_format import make_grammar
from support.intake_parts import READY, TOKENIZER, prepare, refused
from support.tokenizers import BOS, BOS_ID, byte_ids, byte_level_tokenizer

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
CHOICE = {"type": "choice", "choice": ["yes", "no"]}
LARGE = Intake(TOKENIZER, replace(READY, max_model_len=20_000, num_blocks=2000), "tiny")


def _first_piece(prepared: PreparedRequest, text: bytes = b"x") -> str:
    return prepared.detokenizer.append(byte_ids(TOKENIZER, text)[0]).text


def test_each_option_reaches_the_engine() -> None:
    """Bad words as ids, a response format as a grammar, and how many logprobs of the prompt."""
    spec = prepare(bad_words=("ABC", "zz"), response_format=CHOICE, prompt_logprobs=3).sampling
    assert spec.bad_words == spell_words(("ABC", "zz"), TOKENIZER, READY.vocab_size)
    assert spec.grammar == make_grammar(CHOICE)
    assert spec.prompt_logprobs == 3


def test_without_options_the_engine_is_asked_for_nothing() -> None:
    """No grammar, no bad words, no logprobs of the prompt."""
    spec = prepare().sampling
    assert (spec.bad_words, spec.grammar, spec.prompt_logprobs) == ((), None, None)
    assert prepare(response_format={"type": "text"}).sampling.grammar is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bad_words": ("ok", "  ")}, "'  '"),
        ({"response_format": {"type": "regex", "regex": "("}}, "'('"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "?"}}}},
            "'?'",
        ),
    ],
)
def test_what_cannot_be_held_to_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    """B49: the request ends with the value, and never runs without its option."""
    error = refused(**options)
    assert (type(error), error.code) == (InvalidRequest, ErrorCode.INVALID_REQUEST)
    assert named in error.message


def test_prompt_logprobs_that_could_not_travel_are_refused_with_the_numbers() -> None:
    """Of text, only the worker knows how many tokens it has."""
    error = refused(LARGE, prompt="z" * 15_000, prompt_logprobs=20)
    for number in ("20", "15000", "315000", "262144"):
        assert number in error.message
    assert prepare(LARGE, prompt="z" * 15_000, prompt_logprobs=16).sampling.prompt_logprobs == 16


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("Say <pad>é", "Say <pad>é"),
        (tuple(byte_ids(TOKENIZER, "é".encode())), "é"),
        ((BOS_ID, *byte_ids(TOKENIZER, b"a")), f"{BOS}a"),
        (tuple(byte_ids(TOKENIZER, b"a\xc3")), "a\ufffd"),
    ],
)
def test_an_echo_is_the_prompt_as_it_was_given(prompt: Any, text: str) -> None:
    """Text comes back as it is; ids are decoded, their special tokens spelled out."""
    assert _first_piece(prepare(prompt=prompt, echo=True)) == f"{text}x"
    assert _first_piece(prepare(prompt=prompt)) == "x"


def test_an_echo_of_a_chat_is_what_its_template_made() -> None:
    """The reader sees what the model saw."""
    echoed = _first_piece(prepare(messages=(USER,), echo=True))
    assert echoed == "<s>[user]Hi</s>[assistant]x"


def test_an_echo_that_is_too_long_for_one_entry_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It travels with the first token, so it is counted in bytes; both numbers are told."""
    monkeypatch.setattr(intake_module, "MAX_ECHO_BYTES", 4)
    assert _first_piece(prepare(prompt="éé", echo=True)) == "ééx"
    assert "echo of a prompt of 5 bytes, at most 4" in refused(prompt="éaé", echo=True).message


def test_tools_and_variables_reach_the_template() -> None:
    """The chat is rendered with all that the request brings for it."""
    template = "{{ tools[0].name }} {{ mood }} {{ messages[0].content }}"
    intake = Intake(byte_level_tokenizer(chat_template=template), READY, "tiny")
    prepared = prepare(
        intake, messages=(USER,), tools=({"name": "f"},), template_kwargs={"mood": "calm"}
    )
    assert TOKENIZER.decode(prepared.prompt_token_ids) == "f calm Hi"


def _text(output: bytes, **options: Any) -> str:
    detokenizer = prepare(**options).detokenizer
    return "".join(detokenizer.append(i).text for i in byte_ids(TOKENIZER, output))


def test_the_token_that_ends_an_answer_is_no_part_of_its_text() -> None:
    """As in vLLM, its text is shown with include_stop only, also where it is no special token."""
    newline = tuple(byte_ids(TOKENIZER, b"\n"))
    assert _text(b"so\n", stop_token_ids=newline) == "so"
    assert _text(b"so\n", stop_token_ids=newline, include_stop=True) == "so\n"
    assert _text(b"so\n") == "so\n"


def test_the_end_of_a_form_is_no_part_of_its_text() -> None:
    """An end of sequence that is spelled out would break the JSON; it ends it, ignored or not."""
    (end,) = byte_ids(TOKENIZER, b"~")
    tokenizer = byte_level_tokenizer(eos_token_ids=frozenset({end}))
    form = prepare(Intake(tokenizer, READY, "tiny"), response_format=CHOICE, ignore_eos=True)
    assert form.detokenizer.append(end).text == ""


OPTIONS: dict[str, Any] = {
    "max_tokens": 30,
    "min_tokens": 2,
    "temperature": 0.5,
    "stop": ("END", "NDx"),
    "include_stop": True,
    "echo": True,
    "bad_words": ("zz",),
    "response_format": {"type": "regex", "regex": "[a-zA-Z ]*"},
    "prompt_logprobs": 2,
    "logprobs": 2,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {7: 1.0},
}
OUTPUT = byte_ids(TOKENIZER, b"an ENd at the END")


@pytest.mark.parametrize("offset", range(len(OUTPUT) + 1))
def test_a_takeover_at_any_offset_goes_on_as_if_nothing_had_happened(offset: int) -> None:
    """The same spec, and the pieces that one worker alone would have made."""
    alone = prepare(**OPTIONS)
    pieces = [alone.detokenizer.append(token_id) for token_id in OUTPUT]
    emitted = ChunkMessage(tuple(OUTPUT[:offset]), tuple(p.text for p in pieces[:offset]))
    taken_over = prepare(emitted=(emitted,) if offset else (), **OPTIONS)
    assert taken_over.sampling == alone.sampling
    assert taken_over.output_token_ids == tuple(OUTPUT[:offset])
    rest = [taken_over.detokenizer.append(token_id) for token_id in OUTPUT[offset:]]
    assert rest == pieces[offset:]
    is_over = offset == len(OUTPUT)
    assert taken_over.finish_reason is (FinishReason.STOP if is_over else None)
    text = "".join(piece.text for piece in pieces)
    assert text == "Hello" + "an ENd at the END"


def test_the_engine_tells_how_an_output_with_a_grammar_has_ended() -> None:
    """At max_tokens the last token may have completed the form, which is another reason."""
    emitted = (ChunkMessage(tuple(byte_ids(TOKENIZER, b"no")), ("n", "o")),)
    prepared = prepare(emitted=emitted, max_tokens=2, response_format=CHOICE)
    assert prepared.finish_reason is None
    assert prepare(emitted=emitted, max_tokens=2).finish_reason is FinishReason.LENGTH


def test_a_takeover_of_an_echo_with_one_token_brings_no_second_one() -> None:
    """With max_tokens 1 the log has the echo already, and only the end is missing."""
    emitted = (ChunkMessage(tuple(OUTPUT[:1]), ("Helloa",)),)
    prepared = prepare(emitted=emitted, echo=True, max_tokens=1)
    assert prepared.finish_reason is FinishReason.LENGTH
    assert prepared.detokenizer.finish() == ""


@pytest.mark.parametrize(
    ("prompt", "options", "needs"),
    [
        ((5, 6), {"prompt_logprobs": 0}, True),
        ((5,), {"prompt_logprobs": 0}, False),
        ((5, 6), {}, False),
    ],
)
def test_scores_are_needed_where_they_were_asked_for_and_can_be(
    prompt: tuple[int, ...], options: dict[str, Any], needs: bool
) -> None:
    """A prompt of one token has none, so nothing has to be computed for it."""
    assert prepare(prompt=prompt, **options).needs_scores is needs
