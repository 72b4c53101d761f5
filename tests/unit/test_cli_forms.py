"""Flags of the form of an answer: one of them, and a file that holds a schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.forms import form_from
from headrace.errors import ConfigurationError


def test_no_flag_is_no_form() -> None:
    """None, and the empty list that typer gives, ask for nothing."""
    assert form_from(None, None, None) is None
    assert form_from(None, None, []) is None


def test_a_schema_is_read_from_its_file(tmp_path: Path) -> None:
    """The file holds the schema alone, without the envelope of the API."""
    path = tmp_path / "s.json"
    path.write_text('{"title": "é"}', encoding="utf-8")
    expected = {"type": "json_schema", "json_schema": {"schema": {"title": "é"}}}
    assert form_from(path, None, None) == expected


def test_two_forms_are_refused(tmp_path: Path) -> None:
    """The flags are named, as one answer has one form."""
    with pytest.raises(ConfigurationError, match="give one of --regex, --choice, not 2"):
        form_from(None, "a", ["b"])


@pytest.mark.parametrize(
    ("content", "named"),
    [(None, "No such file"), ("{", "is not JSON"), ("[" * 100_000, "is not JSON")],
)
def test_a_file_without_a_schema_is_refused(
    tmp_path: Path, content: str | None, named: str
) -> None:
    """The message names the file and what is wrong with it."""
    path = tmp_path / "s.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=named) as caught:
        form_from(path, None, None)
    assert str(path) in str(caught.value)
