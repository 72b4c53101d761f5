"""Documents stay true: every link, path, target, command and flag that they show exists."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

import headrace
from headrace.cli.app import app
from headrace_worker.options import flag
from headrace_worker.settings import WorkerSettings
from support.repository import ROOT, fences, files, make_targets, shell_lines

README = ROOT / "README.md"
DOCUMENTS = files(".md")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def _name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _headrace_lines(document: Path) -> Iterator[list[str]]:
    for line in shell_lines(document):
        words = shlex.split(line)
        if Path(words[0]).name == "headrace":
            yield words[1:]


def _flags_of(command: str) -> set[str]:
    if command == "worker":  # it hands its flags on to the worker's own parser
        fields = WorkerSettings.model_fields
        off = {flag(f"no_{name}") for name, field in fields.items() if field.annotation is bool}
        return off | set(map(flag, fields))
    return {option for parameter in COMMANDS[command].params for option in parameter.opts}


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name_of)
def test_links_lead_somewhere(document: Path) -> None:
    """Every relative link of a document names a file or folder of the repository."""
    targets = re.findall(r"\]\((?!\w+:|#)([^)#]+)", document.read_text(encoding="utf-8"))
    dead = [target for target in targets if not (document.parent / target).exists()]
    assert dead == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name_of)
def test_paths_in_documents_exist(document: Path) -> None:
    """Every path into the tree that a document spells out exists."""
    pattern = r"`((?:tests|examples|docs|producer|worker|benchmarks|docker)/[\w./-]*)`"
    named = re.findall(pattern, document.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name_of)
def test_make_targets_in_documents_exist(document: Path) -> None:
    """Every `make target` of a shell block is one that `make` lists."""
    named = {
        word
        for line in shell_lines(document)
        if line.startswith("make ")
        for word in line.split()[1:]
        if "=" not in word
    }
    assert named <= make_targets()


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name_of)
def test_commands_and_flags_in_documents_exist(document: Path) -> None:
    """Every `headrace` line of a shell block names a command, with flags that it takes."""
    for command, *words in _headrace_lines(document):
        assert command in COMMANDS
        given = {word for word in words if word.startswith("-")}
        assert given <= _flags_of(command)


def test_the_readme_shows_the_commands_that_matter() -> None:
    """The check above is not empty: the README starts a worker, a batch and a prompt."""
    assert {"worker", "run-batch", "generate"} <= {line[0] for line in _headrace_lines(README)}


def test_flags_in_prose_exist() -> None:
    """A flag in backticks is one that some command takes."""
    known = set().union(*map(_flags_of, COMMANDS)) | {"--scale"}
    for document in DOCUMENTS:
        named = re.findall(r"`(--[a-z-]+)`", document.read_text(encoding="utf-8"))
        assert set(named) <= known, _name_of(document)


def test_names_in_python_blocks_are_public() -> None:
    """What a document imports from headrace is in its public list."""
    blocks = [f.text for doc in DOCUMENTS for f in fences(doc) if f.language == "python"]
    imports = [
        node
        for block in blocks
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and node.module == "headrace"
    ]
    assert imports
    assert {alias.name for node in imports for alias in node.names} <= set(headrace.__all__)


def test_the_first_screen_of_the_readme_is_short() -> None:
    """A drawing, two installs, twelve lines of code, one line to start a worker, in this order."""
    drawing, install, code, worker = fences(README)[:4]
    assert [f.language for f in (drawing, install, code, worker)] == ["", "sh", "python", "sh"]
    assert len(drawing.text.splitlines()) <= 6
    assert len(install.text.splitlines()) == 2
    assert len(code.text.splitlines()) <= 12
    assert len(worker.text.splitlines()) == 1


def test_ci_runs_the_commands_of_the_readme() -> None:
    """CI and a developer run the same targets."""
    ran = re.findall(r"^make (\w+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert ran == ["setup", "check", "test"]
    assert {f"make {target}" for target in ran} <= set(shell_lines(README))


def test_the_changelog_knows_the_version_or_what_comes_next() -> None:
    """The newest section is for changes that are not released, and it is not empty."""
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert sections[0].startswith("[Unreleased]")
    assert "\n- " in sections[0]
