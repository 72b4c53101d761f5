"""The content of messages in the form that a chat template was written for: text, or parts.

Templates of text models put ``message['content']`` into the prompt as it is; those of models that
also see pictures go through its parts; some can do both. Which, is found by trying.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from headrace.checks import shown
from headrace.errors import InvalidRequest

_PROBE = "headrace-probe"


class ContentForm(StrEnum):
    """What a template does with content."""

    TEXT = "text"  # takes text only
    PARTS = "parts"  # goes through parts only
    BOTH = "both"


def find_form(render: Callable[[object], str]) -> ContentForm:
    """Tell a template's form from how it renders one message; empty where it refuses."""
    in_parts = render([{"type": "text", "text": _PROBE}])
    # Quoted, it is part of a list that was printed whole.
    if _PROBE not in in_parts or f"'{_PROBE}'" in in_parts or f'"{_PROBE}"' in in_parts:
        return ContentForm.TEXT
    return ContentForm.BOTH if _PROBE in render(_PROBE) else ContentForm.PARTS


def shape_content(content: object, form: ContentForm) -> str | list[Any]:
    """Return the content of one message; absent content is no text. Raises InvalidRequest."""
    if content is None:
        return ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if form is ContentForm.PARTS else content
    if not isinstance(content, list):
        raise InvalidRequest(f"content must be text or a list of parts, not {shown(content)}")
    texts = [_text_of(part) for part in content]
    return "".join(texts) if form is ContentForm.TEXT else content


def _text_of(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "text"}:
            raise InvalidRequest(f"a content part of type 'text' must have a text: {shown(part)}")
        case {"type": kind}:
            raise InvalidRequest(f"content parts must be of type 'text', not {shown(kind)}")
        case _:
            raise InvalidRequest(f"a content part must have a type, not {shown(part)}")
