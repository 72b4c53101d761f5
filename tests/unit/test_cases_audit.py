"""Every known failure of other engines has a test of ours that says so in its docstring."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from support.repository import below, tree

# The known failures, by the number that docstrings name, and what a user saw.
KNOWN_FAILURES = {
    "B02": "characters split over tokens come out broken",
    "B03": "an invalid byte kills the stream",
    "B04": "an incomplete character at the end is dropped, or not, by mode",
    "B05": "the beginning of a stop string is shown",
    "B06": "of two stop strings the wrong one ends the text",
    "B07": "min_tokens is ignored for stop strings",
    "B08": "spaces vanish when tokens are decoded one by one",
    "B09": "a space is put before the first token",
    "B10": "a prompt that is too long ends the engine",
    "B13": "max_tokens of 0 or 1 hangs or leaks",
    "B14": "greedy answers differ with the batch",
    "B16": "seeded answers depend on the order",
    "B17": "n > 1 gives equal answers, or one stream only",
    "B18": "a tiny temperature or top_p crashes",
    "B19": "top_p of 0 is taken for 1",
    "B20": "NaN passes the checks of the range",
    "B21": "a bias beyond the vocabulary kills the engine",
    "B23": "more candidates than tokens are out of range",
    "B24": "padding of the vocabulary is sampled",
    "B26": "penalties split prompt and output wrongly",
    "B27": "some of several end tokens are ignored",
    "B28": "a second end token ends what ignores ends",
    "B29": "prompt logprobs with a cached prefix are stale",
    "B30": "a logprob of minus infinity is no JSON",
    "B33": "tenants share a prefix",
    "B34": "preempted answers lose or repeat tokens",
    "B35": "preemption without end",
    "B36": "an abort leaves blocks behind",
    "B37": "the same id twice breaks the first",
    "B38": "one bad line spoils a batch file",
    "B39": "a second batch loses results",
    "B40": "a chat begins twice",
    "B41": "a template that refuses ends the engine",
    "B42": "a head is made up, or a tied one missed",
    "B43": "moved rotary fields are overlooked",
    "B45": "rows or biases of GGUF are wrong",
    "B47": "padding writes the last real slot",
    "B48": "a step planned ahead meets a preemption",
    "B49": "an invalid grammar ends the engine",
    "B50": "an idle worker burns a core",
    "B51": "the last tokens are lost with the finish",
    "B52": "a chunk that is not the last is sampled",
    "B53": "a block is freed twice",
}


@cache
def names_by_row() -> dict[str, list[str]]:
    """Return the names of the tests whose docstrings name a row."""
    found: dict[str, list[str]] = {}
    for path in below("tests"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for row in set(re.findall(r"(?<!queue )\bB\d\d\b", ast.get_docstring(node) or "")):
                    found.setdefault(row, []).append(node.name)
    return found


@pytest.mark.parametrize("row", KNOWN_FAILURES, ids=lambda row: f"{row}-{KNOWN_FAILURES[row]}")
def test_a_known_failure_has_a_test(row: str) -> None:
    """Named by its number, so that whoever reads about one finds the other."""
    assert names_by_row().get(row)


def test_no_docstring_names_a_failure_that_is_not_known() -> None:
    """A slip of the pen would hide that a row has no test."""
    assert names_by_row().keys() <= KNOWN_FAILURES.keys()
