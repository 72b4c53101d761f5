"""Chat templates run over whatever messages a client sends, and fail that client alone."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace_worker.serving.chat import Chat
from headrace_worker.serving.tokenizer import Tokenizer
from support.tokenizers import (
    BOS_ID,
    EOS_ID,
    byte_level_tokenizer,
    sentence_piece_tokenizer,
)

BYTE_LEVEL = byte_level_tokenizer()
SENTENCE_PIECE = sentence_piece_tokenizer()

USER: dict[str, Any] = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE], ids=["bytes", "pieces"])
def test_a_chat_has_exactly_one_bos(tokenizer: Tokenizer) -> None:
    """B40: the template's BOS is the only one, whatever the tokenizer adds to raw text."""
    ids = tokenizer.encode_chat(Chat([USER, {"role": "assistant", "content": "Yes?"}, USER]))
    assert (ids[0], ids.count(BOS_ID), ids.count(EOS_ID)) == (BOS_ID, 1, 3)


def test_a_chat_ends_where_the_assistant_begins() -> None:
    """The template is asked for the start of an answer."""
    assert BYTE_LEVEL.render_chat(Chat([USER])) == "<s>[user]Hi</s>[assistant]"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("Hi", "Hi"),
        ([], ""),
        ([{"type": "text", "text": "H"}, {"type": "text", "text": "i"}], "Hi"),
    ],
)
def test_content_is_null_text_or_parts(content: object, text: str) -> None:
    """B41: null is no text, and parts are joined, also for templates that add strings."""
    adds = byte_level_tokenizer(chat_template="{{ '>' + messages[0]['content'] }}")
    assert adds.render_chat(Chat([{"role": "user", "content": content}])) == ">" + text


def test_absent_content_is_no_text() -> None:
    """An assistant's turn may have tool calls only."""
    assert BYTE_LEVEL.render_chat(Chat([{"role": "assistant"}])) == "<s>[assistant]</s>[assistant]"


def test_a_template_s_refusal_is_the_answer() -> None:
    """B41: what the template raises reaches the caller in its own words."""
    with pytest.raises(InvalidRequest, match="no system role here"):
        BYTE_LEVEL.render_chat(Chat([{"role": "system", "content": "Be brief."}, USER]))


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[0]['content'].missing() }}",
        "{{ messages[7]['content'].x }}",
        "{{ 1 // 0 }}",
        "{% if %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_fails_fails_the_request_alone(template: str) -> None:
    """Whatever goes wrong inside a template, unsafe code included, is an invalid request."""
    with pytest.raises(InvalidRequest, match="chat template"):
        byte_level_tokenizer(chat_template=template).render_chat(Chat([USER]))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (7, "7"),
        ({"text": "x"}, "'text'"),
        (["x"], "'x'"),
        ([{"type": "image_url"}], "image_url"),
        ([{"type": "text", "text": 7}], "'text'"),
        ([{}], "{}"),
    ],
)
def test_content_that_is_no_text_is_refused_by_name(content: object, named: str) -> None:
    """The error holds the part that cannot be taken."""
    with pytest.raises(InvalidRequest, match=named):
        BYTE_LEVEL.render_chat(Chat([{"role": "user", "content": content}]))


def test_a_model_without_template_takes_prompts_only() -> None:
    """The error says what to send instead."""
    with pytest.raises(InvalidRequest, match="send a prompt"):
        byte_level_tokenizer(chat_template=None).encode_chat(Chat([USER]))
