"""What a chaos run is asked to do and what came of it: sizes, figures with bounds, problems."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

MOST_PROBLEMS = 20  # that a result keeps; the rest are counted


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a fault."""

    requests: int
    rounds: int = 1  # times that the fault strikes
    tokens: int = 40  # mean length of an answer
    slack: float = 1.0  # bounds on time are wider by this factor, on a machine with other work
    seconds: float = 1.0  # how long a fault lasts that lasts

    def scaled(self, scale: float, least: Size) -> Size:
        """Return a part of this size, and at least another one."""
        return replace(
            self,
            requests=max(least.requests, round(self.requests * scale)),
            rounds=max(least.rounds, round(self.rounds * scale)),
            seconds=max(least.seconds, self.seconds * min(1.0, scale)),
        )


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number; it is as it should be inside its bounds."""

    name: str
    value: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the bounds hold."""
        too_much = self.at_most is not None and self.value > self.at_most
        too_little = self.at_least is not None and self.value < self.at_least
        return not (too_much or too_little)

    def __str__(self) -> str:
        bounds = [
            f"{sign} {bound:g}"
            for sign, bound in (("≤", self.at_most), ("≥", self.at_least))
            if bound is not None
        ]
        value = f"{self.value:,.4g}" if self.value % 1 else f"{self.value:,.0f}"
        return f"{self.name} {value}" + (f" ({', '.join(bounds)})" if bounds else "")


@dataclass(slots=True)
class Result:
    """What came of one fault; several checkers write to it."""

    fault: str
    seed: int
    server: str  # redis or valkey, with its version
    size: Size
    figures: list[Figure] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    missing: str = ""  # what this machine lacks for it; then it was not run
    took_s: float = 0.0

    def measure(
        self,
        name: str,
        value: float,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """Write a number down; outside its bounds it is a problem."""
        figure = Figure(name, value, at_most, at_least)
        self.figures.append(figure)
        if not figure.is_kept:
            self.problems.append(str(figure))

    def time(self, name: str, value_s: float, *, at_most_s: float) -> None:
        """Write a duration down; its bound is widened by the size's slack."""
        self.measure(f"{name}, s", value_s, at_most=at_most_s * self.size.slack)

    def expect(self, holds: bool, problem: str) -> None:
        """Write a problem down unless something holds."""
        if not holds:
            self.problems.append(problem)

    @property
    def verdict(self) -> str:
        """One word."""
        if self.missing:
            return "not run"
        return "FAILED" if self.problems else "passed"

    def document(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        more = len(self.problems) - MOST_PROBLEMS
        problems = [*self.problems[:MOST_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]
        return {**asdict(self), "problems": problems, "verdict": self.verdict}
