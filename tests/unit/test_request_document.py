"""The document of the options and the options themselves say the same."""

from __future__ import annotations

import ast
import dataclasses
import re

import pytest

from headrace.errors import InvalidRequest
from headrace.options import RequestOptions
from headrace.response_format import MAX_CHOICES, normal_response_format
from headrace.sampling import SamplingParams
from headrace.scores import MAX_PROMPT_SCORES
from support.repository import ROOT

TEXT = (ROOT / "docs/requests.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip("`"): cells
    for line in TEXT.splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split(" | ")]) == 5
}
OPTIONS = dataclasses.fields(SamplingParams)


def test_every_option_has_its_row() -> None:
    """A call takes exactly the options of the table, and their sum as SamplingParams."""
    assert set(ROWS) - {"option", "---"} == set(RequestOptions.__annotations__) - {
        "messages",
        "sampling",
    }


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_defaults_are_those_of_the_code(option: dataclasses.Field[object]) -> None:
    """The default in a row is the one that applies."""
    assert ast.literal_eval(ROWS[option.name][2]) == option.default


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_ranges_end_where_the_table_says(option: dataclasses.Field[object]) -> None:
    """Both ends of a range are taken; the whole numbers next to them are not."""
    ends = re.fullmatch(r"(−?\d+) to (−?\d+)(?:, None)?", ROWS[option.name][1])
    if ends is None:  # no range of plain numbers
        return
    low, high = (int(end.replace("−", "-")) for end in ends.groups())
    for value in (low, high):
        SamplingParams(**{option.name: value})
    for value in (low - 1, high + 1):
        with pytest.raises(InvalidRequest, match=option.name):
            SamplingParams(**{option.name: value})


def test_limits_are_those_of_the_code() -> None:
    """The larger numbers in the prose are constants."""
    assert f"{MAX_PROMPT_SCORES:,} values" in TEXT
    assert f"1 to {MAX_CHOICES:,} texts" in TEXT


def test_every_form_of_the_table_is_one() -> None:
    """The types that are listed are the types that exist."""
    listed = re.findall(r"^\| `(\w+)` \|.*\| (?:any|one|JSON|fits)", TEXT, re.MULTILINE)
    values = {"json_schema": {"schema": {}}, "regex": "a", "choice": ["a"]}
    for kind in listed:
        form = {"type": kind} | ({kind: values[kind]} if kind in values else {})
        normal_response_format(form)
    assert listed == ["text", "json_object", "json_schema", "regex", "choice"]
