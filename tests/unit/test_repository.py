"""The house rules that a machine can hold: sizes, docstrings, names, dependencies."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from support.repository import ROOT, below, files, num_lines, tree

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 50
SOURCE = ("producer", "worker")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def _name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _functions(path: Path) -> list[Function]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, Function)]


def _length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def test_no_file_is_longer_than_the_limit() -> None:
    """A file of Python or Lua has at most 300 lines."""
    long = {
        _name_of(p): n
        for p in (*files(".py"), *files(".lua"))
        if (n := num_lines(p)) > MAX_FILE_LINES
    }
    assert long == {}


def test_no_function_is_longer_than_the_limit() -> None:
    """A function has at most 50 lines, its signature included."""
    long = {
        f"{_name_of(path)}:{function.name}": _length(function)
        for path in files(".py")
        for function in _functions(path)
        if _length(function) > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_every_python_file_says_its_one_idea_first() -> None:
    """The first line of a module is a docstring of one sentence."""
    silent = [
        _name_of(path)
        for path in files(".py")
        if not (ast.get_docstring(tree(path)) or "").split("\n")[0].strip().endswith(".")
    ]
    assert silent == []


def test_every_test_states_a_fact() -> None:
    """A test function has a docstring."""
    silent = [
        f"{_name_of(path)}:{function.name}"
        for path in below("tests")
        if path.name.startswith("test_")
        for function in _functions(path)
        if function.name.startswith("test_") and not ast.get_docstring(function)
    ]
    assert silent == []


def test_tests_have_at_least_as_many_lines_as_source() -> None:
    """The tests are not outgrown by what they test."""
    assert sum(map(num_lines, below("tests"))) >= sum(map(num_lines, below(*SOURCE)))


def test_test_files_have_names_of_their_own() -> None:
    """No two test modules share a name, and no test folder is a package."""
    names = [path.name for path in below("tests") if path.name != "conftest.py"]
    assert sorted(set(names)) == sorted(names)
    assert "__init__.py" not in names


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        (
            "a path of somebody's machine",
            r"(?<![\w.~-])/(work|tmp|root|Users|home/(?!headrace\b))/",
        ),
        ("a debt that should be an issue", r"\b(TO" r"DO|FIX" r"ME|XXX)\b"),
        ("an unfinished merge", r"^(<{7}|>{7}) "),
    ],
)
def test_no_file_holds(what: str, pattern: str) -> None:
    """No text file holds what belongs elsewhere."""
    found = [
        f"{_name_of(path)}: {match[0]}"
        for path in files()
        if path != Path(__file__)
        for match in re.finditer(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert found == [], what


def test_no_test_is_skipped_for_convenience() -> None:
    """A skip is for want of a server, says so, and nothing is expected to fail."""
    pattern = re.compile(r"mark\.skip\b|mark\.xfail|pytest\.(?:skip|xfail)\(")
    skipping = [
        f"{_name_of(path)}: {line.strip()}"
        for path in below("tests")
        if path != Path(__file__)
        for line in path.read_text(encoding="utf-8").splitlines()
        if pattern.search(line) and "is not installed on this machine" not in line
    ]
    assert skipping == []


def test_the_client_depends_on_redis_and_msgpack_only() -> None:
    """A bare install brings two packages; a third one needs a written reason."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.match(r"[\w-]+", dependency)[0] for dependency in project["dependencies"]]  # type: ignore[index]
    assert names == ["redis", "msgpack"]


def test_torch_is_one_version_on_cpu_and_a_range_on_cuda() -> None:
    """The CPU extra pins torch, and the CUDA extra takes what the image brings, 2.11 included."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert [line for line in extras["worker"] if "torch" in line] == ["torch==2.13.0"]
    assert [line for line in extras["cuda"] if "torch" in line] == ["torch>=2.11,<3"]
    assert not any("torch" in line for line in extras["engine"])


def test_the_rule_for_a_light_client_names_every_module_of_it() -> None:
    """A new module of the client is under the import rule from its first day."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    package = ROOT / "producer/headrace"
    modules = {f"headrace.{path.stem}" for path in package.glob("*.py")} - {"headrace.__init__"}
    assert set(contracts["contracts"][0]["source_modules"]) == modules


def test_the_two_commands_of_a_fresh_machine_need_nothing_before_them() -> None:
    """`make demo` and `make test` set everything up themselves."""
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert re.search(rf"^{target}: model\b", makefile, re.MULTILINE)
    assert re.search(r"^model: \$\(STAMP\)", makefile, re.MULTILINE)
