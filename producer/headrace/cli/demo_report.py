"""The end of the demo: every answer in brief, then the numbers of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.cli import render
from headrace.cli.demo_metrics import Seen
from headrace.errors import RequestError
from headrace.types import Completion

BRIEF_LENGTH = 200  # characters of an answer


@dataclass(frozen=True, slots=True)
class DemoRun:
    """What a run gave; questions and answers in the order of the file."""

    questions: Sequence[str]
    answers: Sequence[Completion | RequestError]
    seconds: float  # from the first request to the last answer
    seen: Seen  # by the worker

    @property
    def completions(self) -> list[Completion]:
        """The answers, without the errors."""
        return [answer for answer in self.answers if isinstance(answer, Completion)]


def write_report(run: DemoRun) -> None:
    """Print questions with answers, then the numbers."""
    for number, (question, answer) in enumerate(
        zip(run.questions, run.answers, strict=True), start=1
    ):
        said = answer.text if isinstance(answer, Completion) else f"ERROR {answer}"
        render.write_result(f"\n{number:02} {question}\n   {brief(said)}")
    render.write_result("")
    for label, numbers in rows_of(run):
        render.write_result(f"{label:18}{numbers}")


def brief(text: str) -> str:
    """Return the beginning of a text on one line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= BRIEF_LENGTH else f"{flat[:BRIEF_LENGTH].rsplit(' ', 1)[0]} …"


def rows_of(run: DemoRun) -> list[tuple[str, str]]:
    """Return labels and numbers, percentiles where there are many."""
    done, seen = run.completions, run.seen
    output = sum(answer.usage.completion_tokens for answer in done)
    prompt = sum(answer.usage.prompt_tokens for answer in done)
    times = [answer.timings for answer in done if answer.timings is not None]
    ttfts = [time.ttft_s for time in times if time.ttft_s is not None]
    tpots = [time.tpot_s for time in times if time.tpot_s is not None]
    return [
        ("requests", f"{len(done)} of {len(run.answers)} in {run.seconds:.1f} s"),
        ("tokens", f"{prompt} prompt, {output} output"),
        ("output tokens/s", f"{output / max(run.seconds, 1e-9):.1f}"),
        ("TTFT", _percentiles(ttfts)),
        ("TPOT", _percentiles(tpots)),
        ("sequences a step", f"{seen.sequences_a_step:.1f}"),
        ("tokens a step", f"{seen.tokens_a_step:.1f}"),
        ("KV cache use", f"peak {seen.peak_kv_usage:.1%}, mean {seen.mean_kv_usage:.1%}"),
    ]


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least this share of the values does not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _percentiles(values: Sequence[float]) -> str:
    percents = (50, 90, 99)
    return ", ".join(
        f"p{percent} {render.format_seconds(percentile(values, percent / 100))}"
        for percent in percents
    )
