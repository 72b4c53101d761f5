"""The repository as data: its files, its Python syntax trees, its documents' commands."""

from __future__ import annotations

import ast
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Fence:
    """One fenced block of a Markdown file."""

    language: str  # what follows the opening fence; may be empty
    text: str


@cache
def files(suffix: str = "") -> tuple[Path, ...]:
    """Return every file that is, or would be, in the repository; ignored ones are left out."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    found = sorted({ROOT / name for name in listed if name.endswith(suffix) and name})
    return tuple(path for path in found if path.is_file())


def below(*folders: str, suffix: str = ".py") -> list[Path]:
    """Return the repository's files under the given top folders."""
    return [path for path in files(suffix) if path.relative_to(ROOT).parts[0] in folders]


@cache
def tree(path: Path) -> ast.Module:
    """Return the file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def num_lines(path: Path) -> int:
    """Return the number of lines."""
    return len(path.read_text(encoding="utf-8").splitlines())


def fences(path: Path) -> list[Fence]:
    """Return the fenced blocks of a Markdown file, in order."""
    pattern = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [Fence(*match.groups()) for match in pattern.finditer(path.read_text(encoding="utf-8"))]


def shell_lines(path: Path) -> list[str]:
    """Return the commands of a document's shell blocks, without their comments."""
    lines = [
        line.split("  #")[0].strip()
        for fence in fences(path)
        if fence.language == "sh"
        for line in fence.text.splitlines()
    ]
    return [line for line in lines if line and not line.startswith("#")]


def make_targets() -> set[str]:
    """Return the targets that `make` lists."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE))
