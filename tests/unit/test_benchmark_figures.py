"""The benchmark's figures: what is kept of a run, how runs are compared, what is printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import options as benchmark_options
from benchmarks.figures import gigabytes, milliseconds, percentile, ratio, summary
from benchmarks.job import Job, Result, TokenTimes, summarize
from benchmarks.machine import Machine
from benchmarks.memory import PeakMemory, cpu_s, process_tree
from benchmarks.options import parse
from benchmarks.roofline import Shape, limit
from benchmarks.tables import markdown
from benchmarks.workload import Item

SMOLLM2 = Shape(30, 576, 1536, 9, 3, 64, 49_152)


def _job(*lengths: int) -> Job:
    return Job("fake", "mixed", [Item([1, 2], length) for length in lengths], [Item([3], 1)])


def _result(tokens_per_s: float) -> Result:
    return Result("x", "1", 10.0, 4, round(10 * tokens_per_s), [0.1, 0.3], [0.02], 10**9)


def test_a_job_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    """A child process gets the very job, items included."""
    job = _job(3, 4)
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job


def test_a_result_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    """The parent reads what the child measured."""
    _result(50.0).write(tmp_path / "result.json")
    assert Result.read(tmp_path / "result.json") == _result(50.0)


def test_latencies_follow_from_the_times_of_tokens() -> None:
    """TTFT counts from arrival, and TPOT is the mean gap after the first token."""
    times = TokenTimes(arrived_s=1.0)
    for now_s in (1.5, 1.7, 2.1):
        times.saw(now_s)
    assert times.ttft_s == pytest.approx(0.5)
    assert times.tpot_s == pytest.approx(0.3)


def test_one_token_has_no_time_per_token() -> None:
    """A request of one token counts for TTFT only."""
    times = TokenTimes(0.0)
    times.saw(1.0)
    assert times.tpot_s is None


def test_a_request_without_a_token_is_no_result() -> None:
    """Nothing that never came is counted as fast."""
    with pytest.raises(ValueError, match="without a token"):
        _ = TokenTimes(0.0).ttft_s


def test_a_system_that_stops_early_is_refused() -> None:
    """A run in which one request got fewer tokens than forced is no result."""
    times = [TokenTimes(0.0, 1.0, 2.0, 3), TokenTimes(0.0, 1.0, 2.0, 2)]
    with pytest.raises(ValueError, match="2 tokens came, not 4"):
        summarize(_job(3, 4), times, system="x", version="1", elapsed_s=1.0, peak_rss_bytes=1)


def test_percentiles_lie_between_the_values() -> None:
    """The median of four is the middle of the two in the middle; the ends are the ends."""
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, share) for share in (0.0, 0.5, 1.0)] == [1.0, 2.5, 4.0]


def test_the_ratio_is_taken_by_pair() -> None:
    """A slow minute hits both runs of a pair, so it does not change the median ratio."""
    ours = [_result(rate) for rate in (120.0, 30.0, 130.0)]
    theirs = [_result(rate) for rate in (100.0, 25.0, 100.0)]
    assert ratio(ours, theirs) == pytest.approx(1.2)


def test_a_summary_has_medians() -> None:
    """Three runs become one line."""
    told = summary([_result(rate) for rate in (10.0, 30.0, 20.0)])
    assert told["output_tokens_per_s"] == 20.0
    assert told["ttft_p50_s"] == pytest.approx(0.2)
    assert told["peak_rss_bytes"] == 10**9


def test_figures_are_written_with_their_units() -> None:
    """Times have three digits that count, sizes one decimal, and what is missing is a dash."""
    texts = [milliseconds(0.0123), milliseconds(1.5), milliseconds(None), gigabytes(2.55e9)]
    assert texts == ["12.3 ms", "1,500 ms", "–", "2.5 GB"]


def test_tables_are_markdown() -> None:
    """A table has a head, a rule and its rows."""
    assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_memory_counts_children_that_have_ended() -> None:
    """The peak of a process tree keeps what a child once had."""
    with PeakMemory(os.getpid()) as memory:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        memory.look()
        assert child.pid in process_tree(os.getpid())
        alone = memory.peak_bytes
        child.communicate(b"\n")
    assert memory.peak_bytes >= alone > 5_000_000


def test_cpu_time_grows_with_work() -> None:
    """The CPU time of a process is in seconds and never runs back."""
    before = cpu_s(os.getpid())
    sum(range(3_000_000))
    assert before <= cpu_s(os.getpid()) < before + 60


def test_the_machine_says_what_it_is() -> None:
    """Figures come with processor, cores and versions."""
    text = str(Machine.here())
    assert f"{len(os.sched_getaffinity(0))} CPUs" in text
    assert "torch" in text


def test_flags_behind_two_dashes_go_to_the_worker() -> None:
    """The benchmark's own flags end at ``--``, and all others reach every run of ours."""
    options = parse("x", ["--quick", "--dtype", "float32", "--", "--block-size", "32"])
    job = options.job("mixed")
    assert (job.dtype, job.worker_flags) == ("float32", ["--block-size", "32"])
    assert len(job.items) == benchmark_options.QUICK_REQUESTS


def test_threads_are_ours_to_choose_unless_they_are_given() -> None:
    """Our default is what is measured; a number that is given goes to everybody."""
    assert parse("x", []).job("mixed", 1).worker_flags == []
    job = parse("x", ["--num-threads", "1"]).job("mixed", 1)
    assert (job.num_threads, job.worker_flags) == (1, ["--num-threads", "1"])


def test_the_roofline_has_the_model_s_cost() -> None:
    """SmolLM2-135M takes 0.212 GFLOP a token in its layers, 0.057 in the head, 23 KB of KV."""
    assert SMOLLM2.layer_flop / 1e9 == pytest.approx(0.212, abs=0.001)
    assert SMOLLM2.head_flop / 1e9 == pytest.approx(0.057, abs=0.001)
    assert SMOLLM2.kv_bytes == 23_040


def test_a_limit_counts_products_and_reads() -> None:
    """One prompt of two and two outputs: three tokens computed, two rows of logits, one decode."""
    rates = {"bfloat16_flop_per_s": {1: 1e9}, "int8_op_per_s": {1: 2e9}}
    told = limit(SMOLLM2, [Item([1, 2], 2)], 0, {**rates, "bandwidth_bytes_per_s": 1e9})
    assert told["flop"] == 3 * SMOLLM2.layer_flop + 2 * SMOLLM2.head_flop
    assert told["kv_read_bytes"] == 3 * SMOLLM2.kv_bytes
    assert told["bfloat16_products_tokens_per_s"] == pytest.approx(2e9 / told["flop"])
    assert told["int8_tokens_per_s"] < told["int8_products_tokens_per_s"]
