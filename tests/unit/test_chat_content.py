"""Content reaches each chat template in the form that it was written for."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace_worker.serving.chat import Chat
from headrace_worker.serving.chat_content import ContentForm, find_form, shape_content
from support.tokenizers import byte_level_tokenizer

TEXT = "{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}"
PARTS = (
    "{% macro show(content) %}{% for part in content %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}|{% endif %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}[{{ show(m.content) }}]{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{% if m.content is string %}[{{ m.content }}]{% else %}"
    "[{% for part in m.content %}{{ part.text }}|{% endfor %}]{% endif %}{% endfor %}"
)
PRINTED = "{{ messages[0].content | tojson }}"
A_PART: dict[str, Any] = {"type": "text", "text": "a"}
B_PART: dict[str, Any] = {"type": "text", "text": "b"}


def _render(template: str, content: object) -> str:
    tokenizer = byte_level_tokenizer(chat_template=template)
    return tokenizer.render_chat(Chat([{"role": "user", "content": content}]))


@pytest.mark.parametrize(
    ("template", "text", "parts"),
    [
        (TEXT, "[ab]", "[ab]"),
        (PARTS, "[ab|]", "[a|b|]"),
        (BOTH, "[ab]", "[a|b|]"),
        (PRINTED, '"ab"', '"ab"'),
    ],
)
def test_text_and_parts_come_out_whatever_the_template_does(
    template: str, text: str, parts: str
) -> None:
    """Text becomes a part where a template takes parts only, and parts are joined where text."""
    assert _render(template, "ab") == text
    assert _render(template, [A_PART, B_PART]) == parts


def test_a_template_that_refuses_the_trial_takes_text() -> None:
    """One that wants a system message first is taken for what most are."""
    assert find_form(lambda _: "") is ContentForm.TEXT
    wants = "{{ raise_exception('no') if messages[0].role != 'system' }}{{ messages[0].content }}"
    chat = Chat([{"role": "system", "content": [A_PART, B_PART]}])
    assert byte_level_tokenizer(chat_template=wants).render_chat(chat) == "ab"


def test_a_list_that_was_printed_whole_is_not_taken_for_its_parts() -> None:
    """A template that prints what it gets prints Python's quotes, or JSON's."""
    assert find_form(str) is ContentForm.TEXT
    assert find_form(lambda content: f'[{{"text": "{content[0]["text"]}"}}]') is ContentForm.TEXT  # type: ignore[index]


@pytest.mark.parametrize("form", list(ContentForm))
@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([{"type": "text"}], "must have a text"),
        ([{"type": "image_url", "image_url": "x"}], "'image_url'"),
        (["x"], "'x'"),
        (7, "not 7"),
    ],
)
def test_a_part_that_is_no_text_is_refused_whatever_the_template(
    form: ContentForm, content: object, named: str
) -> None:
    """B41: a text part without text fails the request by name, and reaches no template."""
    with pytest.raises(InvalidRequest, match=named):
        shape_content(content, form)
