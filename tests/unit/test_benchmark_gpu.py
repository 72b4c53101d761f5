"""The GPU benchmark around its parts: command line, processes, layouts, shares of limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_parts.clock import Deadline, recorded, seconds_of
from benchmarks.gpu_parts.idle import idle_of, idle_share
from benchmarks.gpu_parts.kernels import describe
from benchmarks.gpu_parts.models import LARGE, SHAPES, SMALL
from benchmarks.gpu_parts.packed import lay_out
from benchmarks.gpu_parts.setup import FULL, TINY, Setup, requests
from benchmarks.gpu_parts.supervise import run_all
from benchmarks.gpu_parts.table import failures, gpu_rows
from benchmarks.report import DOCUMENT, filled
from headrace_worker.model.config import from_values
from support.packed import Share, pack
from support.repository import ROOT

CPU = torch.device("cpu")


def tiny(folder: Path, part_s: float = 30.0) -> Setup:
    """Return a run at toy size."""
    return Setup("cpu", is_tiny=True, part_s=part_s, folder=str(folder))


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    """Run by its path, from anywhere, with nothing installed: exit status 2 and what to do."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""}
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py")]
    done = subprocess.run(
        command, env=environ, cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "sees no CUDA device; --device cpu --tiny" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_cpu_is_measured_at_toy_size_only(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody takes a CPU's figures for a GPU's by mistake."""
    assert gpu.main(["--device", "cpu"]) == gpu.NO_GPU
    assert "--tiny" in capsys.readouterr().err


def test_an_unknown_part_is_refused_with_those_that_there_are() -> None:
    """The list is in the message."""
    with pytest.raises(SystemExit, match="no part speed; there are limits, attention"):
        gpu.main(["--device", "cpu", "--tiny", "--only", "limits,speed"])


def test_parts_that_there_is_no_time_for_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Table and JSON are written all the same, and the exit status is 1."""
    output = tmp_path / "new/gpu.json"
    told = ["--only", "limits,decode", "--most-seconds", "0", "--output", str(output)]
    assert gpu.main(["--device", "cpu", "--tiny", *told]) == 1
    report = json.loads(output.read_text())
    assert list(report["data"]["parts"]) == ["limits", "decode"]
    assert "left out" in report["data"]["parts"]["decode"]["error"]
    assert "decode  " in capsys.readouterr().out


def test_a_part_that_dies_harms_no_other(tmp_path: Path) -> None:
    """Its last words are its error, and the next part has a process of its own."""
    died, limits = run_all(["nothing", "limits"], tiny(tmp_path), most_s=100.0)
    assert died["part"] == "nothing"
    assert died["error"] == "its process ended with 1: KeyError: 'nothing'"
    assert limits["data"]["copy_bytes_per_s"] > 0
    assert limits["data"]["product_flop_per_s"] > 0


def test_a_part_that_hangs_is_ended(tmp_path: Path) -> None:
    """After its time and some grace the process is gone, and the report says why."""
    started_s = time.perf_counter()
    [result] = run_all(["limits"], tiny(tmp_path, part_s=0.0), most_s=9.0, grace_s=0.0)
    assert result["error"] == "it took longer than 0 s"
    assert result["seconds"] < time.perf_counter() - started_s


def test_requests_are_the_yardstick_of_small_engines() -> None:
    """256 of them, the same every time, lengths uniform in 100 to 1,024."""
    items = requests(FULL)
    assert items == requests(FULL)
    prompts, outputs = ([len(i.prompt) for i in items], [i.num_output_tokens for i in items])
    for lengths in (prompts, outputs):
        assert len(lengths) == 256
        assert (min(lengths) < 120, max(lengths) > 1000) == (True, True)
        assert all(100 <= length <= 1024 for length in lengths)
    assert all(token_id < 512 for item in requests(TINY) for token_id in item.prompt)


@pytest.mark.parametrize(("name", "billions"), [(SMALL, 0.6), (LARGE, 8.0)])
def test_models_have_the_published_sizes(name: str, billions: float) -> None:
    """Our own decoder takes both, and their weights are as many as their names say."""
    shape = dict(SHAPES[name])
    config = from_values(shape.pop("model_type"), shape, ())
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (attention + 3 * config.intermediate_size)
    embeddings = config.vocab_size * config.hidden_size * (2 - config.tie_word_embeddings)
    assert round((config.num_layers * layer + embeddings) / 1e9, 1) == billions


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_layout_is_packed_as_a_step_of_the_engine(block_size: int) -> None:
    """Every tensor is what the tests' own packing makes of the same shares and blocks."""
    shares = [(9, 1), (0, 1), (3, 6), (0, 17)]
    layout = lay_out(shares, block_size)
    batches: list[tuple[Any, list[tuple[int, int]]]] = [
        (layout.step(CPU), shares),
        (layout.whole(CPU), [(0, cached + new) for cached, new in shares]),
    ]
    for batch, ranges in batches:
        own = [
            Share([0] * new, cached, ids)
            for (cached, new), ids in zip(ranges, layout.blocks, strict=True)
        ]
        wanted = pack(own, block_size)
        for name in ("positions", "slot_mapping", "cu_seqlens_q", "seq_lens", "block_table"):
            assert torch.equal(getattr(batch, name), getattr(wanted, name)), name
        assert (batch.max_seqlen_q, batch.max_seqlen_k) == (
            wanted.max_seqlen_q,
            wanted.max_seqlen_k,
        )


def test_blocks_of_a_layout_are_scattered_and_nobody_shares_one() -> None:
    """Each is used once, and block 0 by nobody."""
    layout = lay_out([(99, 1), (50, 1)], 4)
    ids = [block for row in layout.blocks for block in row]
    assert sorted(ids) == list(range(1, layout.num_blocks))
    assert ids != sorted(ids)


@pytest.mark.parametrize(
    ("spans", "idle"),
    [
        ([(0, 4)], 0.0),
        ([(0, 1), (3, 4)], 0.5),
        ([(0, 3), (1, 2), (2, 4)], 0.0),
        ([(6, 8), (0, 2), (1, 4)], 0.25),
        ([(5, 5)], 0.0),
    ],
)
def test_idle_is_what_no_kernel_covers(spans: list[tuple[float, float]], idle: float) -> None:
    """Kernels may overlap, lie within others, and come in any order."""
    assert idle_of(spans) == pytest.approx(idle)


def test_a_profiler_that_sees_nothing_is_an_error() -> None:
    """A GPU without a single kernel is not an idle one."""
    with pytest.raises(RuntimeError, match="the profiler saw no kernels"):
        idle_share(lambda: None, CPU)
    assert 0 <= idle_share(lambda: torch.ones(8).sum(), CPU) < 1


def test_a_measurement_is_the_median_of_runs_within_its_time() -> None:
    """It warms up once, runs once at least, and never after its time."""
    runs: list[int] = []
    assert seconds_of(recorded(lambda: runs.append(1), CPU), CPU, most_s=0.0) >= 0
    assert len(runs) == 3
    assert Deadline(-1).left_s == 0
    assert 0 < Deadline(9).left_s <= 9


def test_steps_are_told_in_words() -> None:
    """Equal shares are counted together."""
    assert describe(((1023, 1),) * 256) == "256 × 1,024"
    assert describe(((8192, 512), (0, 64))) == "1 × 512 new + 8,192, 1 × 64 new"


def test_shares_are_of_the_limits_measured_in_the_same_run() -> None:
    """Half the copy's bytes a second are 50 %; a step's limit is the slower of its two."""
    limits = {
        "device": "H", "memory_bytes": 2**30, "versions": {"torch": "2"}, "dtype": "bfloat16",
        "copy_bytes_per_s": 4e12, "product_flop_per_s": 1e15,
    }  # fmt: skip
    case = {"backend": "b", "model": "m", "shares": "s", "layer_s": 1e-5}
    steady = {"num_seqs": 2, "mean_keys": 9.0, "step_s": 0.01, "read_bytes": 2e10, "flop": 6e12}
    table = _table(
        {
            "limits": limits,
            "decode": {"cases": [{**case, "kv_bytes_per_s": 2e12}], "num_left_out": 3},
            "prefill": {"cases": [{**case, "flop_per_s": 2.5e14}], "num_left_out": 0},
            "large step": {"steady": {**steady, "idle": 0.04}},
        }
    )
    assert table["decode: m, b, s"] == "2e+03 GB/s, 50 % of the copy, 10 µs a layer"
    assert table["prefill: m, b, s"] == "250 TFLOP/s, 25 % of the product, 10 µs a layer"
    assert table["large step: step of 2 decodes, 9 keys each"] == "10.0 ms, 60 % of the roofline"
    assert table["large step: GPU idle"] == "4.0 %"
    assert table["decode: left out for want of time"].startswith("3 cases")


@pytest.mark.parametrize(
    ("run", "is_failure"),
    [({"num_different": 0}, False), ({"num_different": 1}, True), ({"failure": "no"}, True)],
)
def test_another_token_than_the_reference_is_a_failure(
    run: dict[str, Any], is_failure: bool
) -> None:
    """So is a backend that raises; the exit status says so."""
    assert bool(failures({"tokens": {"data": {"num_ids": 9, "runs": [run]}}})) is is_failure


def test_a_report_goes_into_the_document(tmp_path: Path) -> None:
    """`make bench-report` writes the table where docs/performance.md has room for it."""
    output = tmp_path / "gpu.json"
    told = ["--only", "limits", "--most-seconds", "0", "--output", str(output)]
    gpu.main(["--device", "cpu", "--tiny", *told])
    text = filled("<!-- bench:gpu -->\nnot yet\n<!-- /bench:gpu -->", tmp_path)
    assert "| limits | failed: left out, as the time was up |" in text
    assert "<!-- bench:gpu -->\n" in DOCUMENT.read_text("utf-8")


def test_without_limits_there_are_no_shares() -> None:
    """A part whose neighbour failed shows what it measured."""
    case = {"backend": "b", "model": "m", "shares": "s", "layer_s": 1e-5, "kv_bytes_per_s": 1e9}
    assert _table({"decode": {"cases": [case], "num_left_out": 0}}) == {
        "decode: m, b, s": "1 GB/s, 10 µs a layer",
        "all of it took": "1 s",
    }


def test_answers_agree_up_to_the_first_token_that_differs() -> None:
    """What follows it had another context."""
    run = {
        "output_tokens_per_s": 10.0, "num_finished": 2, "num_requests": 2, "elapsed_s": 1.0,
        "steady": {"num_seqs": 1, "mean_keys": 1.0, "step_s": 0.1, "idle": "not allowed"},
    }  # fmt: skip
    table = _table(
        {
            "engine plain": {**run, "answers": [[1, 2, 3], [4, 5]]},
            "engine graphs": {**run, "answers": [[1, 9, 3], [4, 5]]},
        }
    )
    assert table["engine graphs: first tokens as without"] == "3 of 5"
    assert table["engine graphs: GPU idle"] == "not allowed"
    assert "engine plain: first tokens as without" not in table


def _table(data: dict[str, Any]) -> dict[str, str]:
    parts = {name: {"data": found} for name, found in data.items()}
    return dict(gpu_rows({"parts": parts, "seconds": 1.0}))
