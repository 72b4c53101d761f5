"""What people see: one line under an answer, tables for eyes or for pipes, progress."""

from __future__ import annotations

import asyncio
import io
import json
import sys

import pytest
from rich.console import Console

from headrace.cli import progress, render
from headrace.cli.batch_run import BatchCounts
from headrace.types import Completion, FinishReason, RequestState, Timings, Usage
from support.waiting import eventually_async


def completion(usage: Usage, timings: Timings | None) -> Completion:
    """An answer with these numbers."""
    return Completion("r", "text", (1,), FinishReason.LENGTH, usage, timings)


@pytest.mark.parametrize(
    ("usage", "timings", "line"),
    [
        (
            Usage(36, 20),
            Timings(0.1, 0.25, 0.05, 2.0),
            "20 tokens after 36 · TTFT 250 ms · 20.0 tokens/s · finish: length",
        ),
        (
            Usage(36, 1, 16),
            Timings(0.1, 1.25, None, 2.0),
            "1 tokens after 36 (16 cached) · TTFT 1.25 s · finish: length",
        ),
        (Usage(3, 0), None, "0 tokens after 3 · finish: length"),
        (Usage(3, 0), Timings(0.1, None, None, 0.2), "0 tokens after 3 · finish: length"),
    ],
)
def test_the_summary_says_what_is_known(usage: Usage, timings: Timings | None, line: str) -> None:
    """Times that do not exist are left out."""
    assert render.summary_of(completion(usage, timings)) == line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.0, "0 ms"), (0.0841, "84 ms"), (0.9994, "999 ms"), (1.0, "1.00 s")],
)
def test_durations_are_written_for_people(seconds: float | None, text: str) -> None:
    """Milliseconds below a second."""
    assert render.format_seconds(seconds) == text


def test_times_are_written_in_utc() -> None:
    """Unix seconds become a date, and nothing stays nothing."""
    assert render.format_time(0.5) == "1970-01-01 00:00:00.500+00:00"
    assert render.format_time(None) is None


def test_a_table_for_a_pipe_is_tab_separated(capsys: pytest.CaptureFixture[str]) -> None:
    """One row a line, empty cells kept, and nothing cut off."""
    render.write_table(("name", "value"), [("a", 1), ("b" * 300, None)])
    assert capsys.readouterr().out == f"name\tvalue\na\t1\n{'b' * 300}\t\n"


def test_a_table_for_a_terminal_is_aligned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Columns stand under their headings, and what looks like markup is text."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")  # no styles
    render.write_table(("name", "value"), [("[red]a[/]", 1), ("bb", 2)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["name", "value"], ["[red]a[/]", "1"], ["bb", "2"]]
    assert (
        len({line.index(word) for line, word in zip(lines, ("value", "1", "2"), strict=True)}) == 1
    )


def test_messages_go_to_stderr_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets of a message are no markup, and long lines are not broken."""
    render.say("[bold]x[/bold] " + "y" * 200)
    render.fail("it [broke]")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "[bold]x[/bold] " + "y" * 200 + "\nheadrace: it [broke]\n"


def test_values_become_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Enums are written by value, text as it is."""
    render.write_json(render.plain({"state": RequestState.QUEUED, "text": "ü", "at": (1, None)}))
    raw = capsys.readouterr().out
    assert json.loads(raw) == {"state": "queued", "text": "ü", "at": [1, None]}
    assert "ü" in raw


async def first_output(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return stdout and stderr as soon as something is on stderr."""

    async def captured() -> list[str]:
        out, err = capsys.readouterr()
        return [out, err] if err else []

    return await eventually_async(captured)


async def test_progress_without_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Done, failed, in flight and the rate; nothing on stdout."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.001)
    counts = BatchCounts(num_skipped=1, num_answered=2, num_failed=3, num_in_flight=4)
    async with progress.shown_progress(counts, 10):
        out, err = await first_output(capsys)
    assert out == ""
    assert err.startswith("6 of 10 done, 3 failed, 4 in flight, 0 tokens/s\n")


async def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows how many of how many, the rate and the failures, and ends with the last counts."""
    screen = io.StringIO()
    monkeypatch.setattr(
        progress, "err_console", lambda: Console(file=screen, force_terminal=True, width=120)
    )
    counts = BatchCounts(num_skipped=2)
    async with progress.shown_progress(counts, 7):
        await asyncio.sleep(0)
        counts.num_answered, counts.num_failed = 4, 1
    shown = screen.getvalue()
    assert "7/7" in shown
    assert "1 failed" in shown
    assert "tokens/s" in shown


async def test_progress_of_a_pipe_has_no_total(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What nobody has counted is not claimed."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.001)
    async with progress.shown_progress(BatchCounts(num_answered=5), None):
        _, err = await first_output(capsys)
    assert err.startswith("5 done, 0 failed")
