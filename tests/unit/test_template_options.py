"""Tools and variables of a chat template: what is taken, and what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.template_options import (
    MAX_TOOLS,
    RESERVED,
    check_has_template,
    normal_template_kwargs,
    normal_tools,
)

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(("tools", "expected"), [(None, ()), ([], ()), ([TOOL], (TOOL,))])
def test_tools_are_a_tuple_of_maps(tools: Any, expected: Any) -> None:
    """None and an empty list are no tools; a list is kept as it is, in a copy."""
    normal = normal_tools(tools)
    assert normal == expected
    assert not normal or normal[0]["function"] is not TOOL["function"]


@pytest.mark.parametrize(
    ("tools", "named"),
    [
        ("f", "tools must be a list, not 'f'"),
        (TOOL, "tools must be a list, not {"),
        (["f"], "tools must hold maps, not 'f'"),
        ([{}], "tools must hold maps, not {}"),
        ([{"x": math.nan}], "must be a finite number, not nan"),
        ([{"x": {1, 2}}], "which JSON does not know"),
        ([TOOL] * (MAX_TOOLS + 1), "entries, at most"),
        ([{"x": "y" * 300_000}], "bytes, at most"),
    ],
)
def test_bad_tools_are_refused_by_name(tools: Any, named: str) -> None:
    """What is no list of maps of JSON values, or too much, raises InvalidRequest."""
    with pytest.raises(InvalidRequest) as caught:
        normal_tools(tools)
    assert named in caught.value.message


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ([], "must be a map, not []"),
        ({5: 1}, "the key 5"),
        ({"not a name": 1}, "'not a name', which is no name"),
        ({"x": math.inf}, "must be a finite number, not inf"),
        ({"x": "y" * 20_000}, "bytes, at most"),
        *[({name: 1}, f"must not set '{name}'") for name in sorted(RESERVED)],
    ],
)
def test_bad_variables_are_refused_by_name(kwargs: Any, named: str) -> None:
    """No variable takes the place of what the worker gives to the template, or of the template."""
    with pytest.raises(InvalidRequest) as caught:
        normal_template_kwargs(kwargs)
    assert named in caught.value.message


def test_variables_are_kept() -> None:
    """A variable may be any JSON value; None is no variables."""
    assert normal_template_kwargs({"enable_thinking": False}) == {"enable_thinking": False}
    assert normal_template_kwargs(None) == {}


def test_a_bare_prompt_takes_no_tools() -> None:
    """Without messages no template is rendered, so nothing for it is silently dropped."""
    check_has_template([{"role": "user"}], (TOOL,), {"x": 1})
    check_has_template(None, (), {})
    with pytest.raises(InvalidRequest, match="tools needs messages"):
        check_has_template(None, (TOOL,), {})
    with pytest.raises(InvalidRequest, match="chat_template_kwargs needs messages"):
        check_has_template(None, (), {"x": 1})
