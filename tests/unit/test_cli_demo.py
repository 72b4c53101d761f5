"""The demo's parts: what is read from /metrics, what the views show, what the table says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rich.console import Console

from headrace.cli.batch_file import BatchRequest
from headrace.cli.demo import question_of, read_requests
from headrace.cli.demo_metrics import MetricsWatch, Seen, parse_samples
from headrace.cli.demo_report import DemoRun, brief, percentile, rows_of
from headrace.cli.demo_view import LineView, PaneView
from headrace.errors import ConfigurationError, EngineFailure
from headrace.types import Completion, FinishReason, Timings, Usage
from headrace_worker.engine.messages import StepOutcome
from headrace_worker.serving.http import MetricsServer
from headrace_worker.serving.metrics import Metrics
from support.repository import ROOT

PROMPTS = ROOT / "examples" / "prompts.jsonl"


def outcome(step: int, free_blocks: int) -> StepOutcome:
    """A step of five sequences and nine tokens."""
    return StepOutcome(
        step=step,
        tokens=(),
        finished=(),
        failed=(),
        admitted=(),
        preempted=(),
        num_running=5,
        num_waiting=0,
        free_blocks=free_blocks,
        num_blocks=100,
        num_scheduled_tokens=9,
        num_prefill_tokens=4,
        num_scheduled_seqs=5,
        adds_seen=5,
        step_s=0.1,
    )


def completion(tokens: int, ttft_s: float, tpot_s: float | None) -> Completion:
    """An answer with times."""
    times = Timings(queue_s=0.0, ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=1.0)
    usage = Usage(10, tokens)
    return Completion("r", "An answer.", (1,), FinishReason.STOP, usage, times)


def test_the_example_prompts_are_32_different_questions() -> None:
    """The file that the demo answers is well-formed, and no question is asked twice."""
    requests = read_requests(PROMPTS)
    assert len({question_of(request) for request in requests}) == len(requests) == 32
    assert all(isinstance(request, BatchRequest) for request in requests)
    assert {request.body.sampling.max_tokens for request in requests} == {96}


@pytest.mark.parametrize(
    ("content", "named"), [("", "holds no request"), ("{}", "line 1"), (None, "cannot be read")]
)
def test_a_file_that_is_not_all_good_is_refused(
    tmp_path: Path, content: str | None, named: str
) -> None:
    """The demo names the line instead of answering the others."""
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=named):
        read_requests(path)


async def test_the_watch_sees_what_the_worker_publishes() -> None:
    """Steps before the watch do not count; means and the peak of the KV cache come out."""
    metrics = Metrics()
    metrics.observe_step(outcome(1, free_blocks=100))
    server = MetricsServer(metrics, unready=lambda: ())
    await server.start()
    async with MetricsWatch(server.port) as watch:
        for step, free_blocks in ((2, 60), (3, 80)):
            metrics.observe_step(outcome(step, free_blocks))
            await watch.look()
    seen = watch.seen()
    await server.stop()
    assert (seen.num_steps, seen.tokens_a_step, seen.sequences_a_step) == (2, 9, 5)
    assert seen.peak_kv_usage == pytest.approx(0.4)
    assert seen.mean_kv_usage == pytest.approx(0.3)


async def test_a_page_that_is_away_is_no_error() -> None:
    """A worker of somebody else has no page, and the table then shows zeros."""
    async with MetricsWatch(1) as watch:
        await asyncio.sleep(0)
    assert watch.seen() == Seen()


def test_samples_are_added_up_over_labels() -> None:
    """Comments and other names are left out."""
    page = '# HELP headrace_x x\nheadrace_x{a="1"} 2.0\nheadrace_x{a="2"} 3\npython_x 9\n'
    assert parse_samples(page) == {"headrace_x": 5.0}


def test_percentiles_are_values_that_occur() -> None:
    """The nearest rank, and nothing of nothing."""
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99)] == [3.0, 5.0, 5.0]
    assert percentile([], 0.5) is None


def test_the_table_counts_answers_tokens_and_times() -> None:
    """Failures are counted against the requests, and a lone token has no TPOT."""
    answers = [completion(10, 0.1, 0.02), completion(1, 0.3, None), EngineFailure("x")]
    seen = Seen(2, 18, 10, 0.4, 0.3)
    rows = dict(rows_of(DemoRun(["a", "b", "c"], answers, 2.0, seen)))
    assert rows["requests"] == "2 of 3 in 2.0 s"
    assert rows["tokens"] == "20 prompt, 11 output"
    assert rows["output tokens/s"] == "5.5"
    assert rows["TTFT"] == "p50 100 ms, p90 300 ms, p99 300 ms"
    assert rows["TPOT"] == "p50 20 ms, p90 20 ms, p99 20 ms"
    assert rows["sequences a step"] == "5.0"
    assert rows["KV cache use"] == "peak 40.0%, mean 30.0%"


def test_an_answer_in_brief_is_one_line() -> None:
    """Long texts are cut between words."""
    assert brief("one\n two") == "one two"
    assert brief("word " * 100).endswith("word …")


def test_lines_of_streams_interleave(capsys: pytest.CaptureFixture[str]) -> None:
    """A line is printed when it is full, under its stream's number; the rest at the end."""
    view = LineView()
    view.add(0, "a " * 30)
    view.add(1, "b " * 40)
    view.add(0, "a " * 10)
    view.end(0)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:6] for line in lines] == ["[02] b", "[01] a", "[01] a"]
    assert "".join(lines).count("a") == 40


def test_a_text_without_blanks_is_cut_anyway(capsys: pytest.CaptureFixture[str]) -> None:
    """No text holds its line back for ever."""
    view = LineView()
    view.add(0, "x" * 100)
    view.end(0)
    assert capsys.readouterr().out.count("x") == 100


def test_panes_show_streams_until_they_end() -> None:
    """Each pane has its question and the end of its text; one that ended makes room."""
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    view = PaneView([f"question {i}" for i in range(9)])
    for at in range(8):
        view.add(at, f"text {at} ")
    view.end(0)
    console.print(view)
    shown = console.export_text()
    assert "1 of 9 answered, 7 streaming" in shown
    assert "02 question 1" in shown
    assert "text 6" in shown
    assert "question 0" not in shown
    assert "question 7" not in shown
