"""A deliberate fault: a few words of the source, what to write instead, who must notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class FaultDoesNotApply(RuntimeError):
    """The text to replace is not in the file exactly once: source and fault have drifted apart."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One change of one file that makes the system wrong."""

    name: str  # what is wrong, in a few words
    file: str  # path below the root of the source
    before: str  # stands in the file exactly once
    after: str
    test: str  # pytest's id of the one test that must fail

    def plant(self, root: Path) -> None:
        """Change the file below ``root``; raises FaultDoesNotApply."""
        path = root / self.file
        source = path.read_text("utf-8")
        if (count := source.count(self.before)) != 1:
            raise FaultDoesNotApply(f"{self.name}: {self.before!r} is {count} times in {self.file}")
        path.write_text(source.replace(self.before, self.after), "utf-8")
