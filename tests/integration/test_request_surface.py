"""Every option of a request does what it says, through a real worker and a real model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import Completion, FinishReason, InvalidRequest
from headrace.protocol import ChunkMessage
from headrace_worker.serving.outbox import EmitPolicy, Outbox
from support.streams import chunks_of
from support.tiny_worker import TinyWorker, tiny_worker

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"enum": [7, 36]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyWorker]:
    """Give one worker for all tests of this file."""
    with tiny_worker(tmp_path_factory.mktemp("tiny")) as worker:
        yield worker


@pytest.fixture(scope="module")
def plain(tiny: TinyWorker) -> Completion:
    """Give the answer without any option."""
    answer = tiny.ask()
    assert len(answer.text) > 8
    return answer


def _form(kind: str, value: object) -> dict[str, Any]:
    return {"response_format": {"type": kind, kind: value}}


def test_an_included_stop_string_ends_the_text(tiny: TinyWorker, plain: Completion) -> None:
    """B06: with include_stop the text ends with the stop string, without it before."""
    stop = plain.text[4:6]
    end = plain.text.index(stop)
    shown = tiny.ask(stop=[stop], include_stop=True)
    assert (shown.text, shown.finish_reason) == (plain.text[: end + 2], FinishReason.STOP)
    assert tiny.ask(stop=[stop]).text == plain.text[:end]


def test_a_stop_token_is_shown_with_include_stop_only(tiny: TinyWorker, plain: Completion) -> None:
    """Its id is in the answer either way; the text ends before it, or with it."""
    token_id = plain.token_ids[-1]
    hidden, shown = (
        tiny.ask(stop_token_ids=[token_id], include_stop=included) for included in (False, True)
    )
    end = plain.token_ids.index(token_id) + 1
    assert hidden.token_ids == shown.token_ids == plain.token_ids[:end]
    assert hidden.finish_reason is shown.finish_reason is FinishReason.STOP
    assert plain.text.startswith(shown.text)
    assert len(shown.text) > len(hidden.text)
    assert shown.text.startswith(hidden.text)


@pytest.mark.parametrize("max_tokens", [1, 16])
def test_an_echo_begins_the_text(tiny: TinyWorker, max_tokens: int) -> None:
    """The prompt is the beginning of the text, whether it was text, ids or a chat."""
    answer = tiny.ask(max_tokens=max_tokens)
    assert tiny.ask(max_tokens=max_tokens, echo=True).text == f"the river{answer.text}"
    ids = [72, 105]
    said = tiny.ask(ids, max_tokens=max_tokens).text
    assert tiny.ask(ids, max_tokens=max_tokens, echo=True).text.endswith(said)
    chat = tiny.ask(None, messages=[USER], max_tokens=max_tokens, echo=True)
    assert chat.text.startswith("user: Hi\n")


def test_a_bad_word_is_never_said(tiny: TinyWorker, plain: Completion) -> None:
    """What the model says is banned, then what it says instead, and so on."""
    words: list[str] = []
    answer = plain
    for _ in range(3):
        words += re.findall("[a-z]{2}", answer.text)[:1]
        answer = tiny.ask(bad_words=words)
        assert not any(word in answer.text for word in words), words
    assert len(words) > 1


def test_prompt_logprobs_come_one_a_token(tiny: TinyWorker) -> None:
    """B29: the first is null, and asking again, with the prompt in the cache, gives the same."""
    answers = [tiny.ask("the water of the mill " * 8, prompt_logprobs=2) for _ in range(2)]
    scores = answers[0].prompt_logprobs
    assert scores is not None
    assert scores == answers[1].prompt_logprobs
    assert (len(scores), scores[0]) == (answers[0].usage.prompt_tokens, None)
    for score in scores[1:]:
        assert score is not None
        assert len(score.top) == 2
        assert score.logprob <= score.top[0][1] <= 0
    assert answers[0].text == tiny.ask("the water of the mill " * 8).text


def test_a_schema_is_held_to(tiny: TinyWorker) -> None:
    """The answer is JSON of the schema, whole, and ends with reason stop."""
    schema = _form("json_schema", {"schema": PERSON})
    for seed in range(3):
        answer = tiny.ask(temperature=1.0, seed=seed, max_tokens=100, **schema)
        person = json.loads(answer.text)
        assert (list(person), person["age"] in (7, 36)) == (["name", "age"], True)
        assert answer.finish_reason is FinishReason.STOP


def test_an_expression_and_a_choice_are_held_to(tiny: TinyWorker) -> None:
    """The text is one that the expression describes, and one of the choices."""
    answer = tiny.ask(temperature=1.0, **_form("regex", "[0-9]{3}-[0-9]{2}"))
    assert answer.text.replace("-", "").isdigit()
    assert (len(answer.text), answer.finish_reason) == (6, FinishReason.STOP)
    chosen = {
        tiny.ask(temperature=2.0, seed=n, **_form("choice", ["mill", "river"])).text
        for n in range(6)
    }
    assert chosen <= {"mill", "river"}


def test_an_echo_is_there_when_the_form_leaves_no_room_for_a_token(tiny: TinyWorker) -> None:
    """The answer is complete before its first token, and its text is the prompt's."""
    answer = tiny.ask(echo=True, **_form("regex", "()"))
    assert (answer.text, answer.token_ids) == ("the river", ())
    assert answer.finish_reason is FinishReason.STOP


def test_a_form_that_is_cut_short_ends_with_length(tiny: TinyWorker) -> None:
    """max_tokens counts also in the midst of a form, and the reason says so."""
    answer = tiny.ask(max_tokens=3, **_form("regex", "[ab]{40}"))
    assert answer.finish_reason is FinishReason.LENGTH
    assert set(answer.text) <= {"a", "b"}


def test_tools_variables_and_parts_reach_the_model(tiny: TinyWorker) -> None:
    """The prompt is what the template makes of all three."""
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    answer = tiny.ask(
        None,
        messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": ""}],
        tools=[TOOL],
        chat_template_kwargs={"mood": "calm"},
        echo=True,
        max_tokens=1,
    )
    assert answer.text.startswith("(calm)look_up;user: Hi\nassistant: \n")


def test_several_answers_have_their_own_forms(tiny: TinyWorker) -> None:
    """B17: n, seeds and logprobs go together with a grammar and an echo."""
    answer = tiny.ask(n=3, temperature=2.0, echo=True, logprobs=1, **_form("regex", "[a-z]{12}"))
    texts = {choice.text for choice in answer.choices}
    assert len(texts) == 3
    for choice in answer.choices:
        assert choice.text.startswith("the river")
        assert len(choice.text) == len("the river") + 12
        assert choice.logprobs is not None


EVERYTHING: dict[str, Any] = {
    "max_tokens": 16,
    "temperature": 1.5,
    "seed": 11,
    "echo": True,
    "logprobs": 1,
    "prompt_logprobs": 1,
    "bad_words": ["ee", "q"],
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.1,
    "min_tokens": 2,
    "stop": ["never said"],
    "include_stop": True,
    **_form("regex", "[a-z]{4,12}!"),
}


def test_a_request_with_every_option_survives_a_takeover_at_any_offset(tiny: TinyWorker) -> None:
    """Whatever another worker has emitted, the answer is what one worker alone would have given.

    Also when all tokens are there, and only the end is missing.
    """
    alone = tiny.ask("the mill", request_id="alone", **EVERYTHING)
    assert re.fullmatch("the mill[a-z]{4,12}!", alone.text)
    logs = {f"r{n}": _beginning(tiny, "alone", n) for n in range(len(alone.token_ids) + 1)}
    with tiny.held():
        for request_id in logs:
            tiny.client.submit("the mill", request_id=request_id, **EVERYTHING)
        tiny.vanish_with(logs)
    for request_id in logs:
        with tiny.client.attach(request_id) as stream:
            text = "".join(chunk.text for chunk in stream)
            taken_over = stream.completion
        assert (request_id, text) == (request_id, alone.text)
        assert (taken_over.token_ids, taken_over.finish_reason) == (
            alone.token_ids,
            alone.finish_reason,
        )
        assert _scores(taken_over) == pytest.approx(_scores(alone), abs=1e-3)


@pytest.mark.parametrize(("max_tokens", "reason"), [(6, "stop"), (5, "length")])
def test_a_form_that_was_complete_at_max_tokens_has_ended_by_itself(
    tiny: TinyWorker, max_tokens: int, reason: str
) -> None:
    """The reason is the same when only the end was missing, and another worker finds it out."""
    options = {"max_tokens": max_tokens, "temperature": 0, **_form("regex", "[0-9]{6}")}
    alone = tiny.ask(request_id=f"alone-{reason}", **options)
    assert (len(alone.token_ids), alone.finish_reason) == (max_tokens, reason)
    with tiny.held():
        tiny.client.submit(
            "the river", request_id=f"late-{reason}", **options, seed=1, ignore_eos=True
        )
        tiny.vanish_with({f"late-{reason}": _beginning(tiny, f"alone-{reason}", max_tokens)})
    with tiny.client.attach(f"late-{reason}") as stream:
        assert stream.read().finish_reason == reason


def _scores(answer: Completion) -> dict[Any, float]:
    """Return every logprob by place and token; in another batch their last bits differ."""
    assert answer.logprobs is not None
    assert answer.prompt_logprobs is not None
    return {
        (place, token_id, is_top): logprob
        for place, score in enumerate((*answer.prompt_logprobs, *answer.logprobs))
        if score is not None
        for is_top, pairs in ((True, score.top), (False, ((score.token_id, score.logprob),)))
        for token_id, logprob in pairs
    }


def _beginning(tiny: TinyWorker, request_id: str, num_tokens: int) -> ChunkMessage | None:
    """Return the beginning of the log of a request that ran alone."""
    outbox = Outbox(EmitPolicy(), attached=True, emitted=chunks_of(tiny.driver, request_id))
    outbox.settle(0, now=0.0)
    outbox.num_sent = num_tokens
    piece = outbox.next_slice()
    return piece.message if piece and num_tokens else None


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a schema": (_form("json_schema", {"schema": {"type": "nope"}}), "nope"),
    "a keyword": (_form("json_schema", {"schema": {"not": {}}}), "not"),
    "an expression": (_form("regex", "("), "unclosed group"),
    "a bad word": ({"bad_words": [" "]}, "' '"),
    "a part": (
        {"prompt": None, "messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "text",
    ),
    "a picture": (
        {"prompt": None, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "image_url",
    ),
    "an id": ({"prompt": [5, 99_999]}, "99999"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_fails_alone_with_its_value_named(
    tiny: TinyWorker, plain: Completion, name: str
) -> None:
    """B49: its neighbours' answers are what they were, and the worker goes on."""
    options, named = BAD[name]
    before = tiny.client.submit("the river", max_tokens=16, temperature=0, ignore_eos=True)
    with pytest.raises(InvalidRequest, match=re.escape(named)) as caught:
        tiny.ask(**options)
    assert caught.value.worker_id == "worker-1", "the client could not know"
    with tiny.client.attach(before) as stream:
        assert [i for chunk in stream for i in chunk.token_ids] == list(plain.token_ids)
    assert tiny.ask().text == plain.text
