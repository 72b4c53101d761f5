"""Every part of the GPU benchmark at toy size on a CPU, so that a GPU's time is for measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed on this machine")
from benchmarks.gpu_parts import conformance, rows
from benchmarks.gpu_parts.engine_runs import switches
from benchmarks.gpu_parts.parts import all_parts, engine_part, run_part
from benchmarks.gpu_parts.setup import Setup
from benchmarks.gpu_parts.table import failures, gpu_rows
from headrace_worker.attention.cpu import CpuBackend
from headrace_worker.model.triton_row_ops import TritonRowOps

PARTS = all_parts()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all parts once, in this process."""
    torch.set_num_threads(1)
    setup = Setup("cpu", is_tiny=True, part_s=60.0, folder=str(tmp_path_factory.mktemp("gpu")))
    return {name: run_part(name, part, setup) for name, part in PARTS.items()}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_runs_and_shows_its_figures(results: dict[str, Any], name: str) -> None:
    """It ends without an error, and the table has a row of it at least."""
    assert "error" not in results[name], results[name]
    table = gpu_rows({"parts": results, "seconds": 1.0})
    assert any(what.startswith(f"{name}: ") and figure for what, figure in table)
    assert not any("fail" in figure or "Error" in figure for _, figure in table)


def test_backends_and_kernels_are_right(results: dict[str, Any]) -> None:
    """Whatever runs here computes what the reference does, in every dtype, and no case is lost."""
    attention = results["attention"]["data"]
    assert {case["backend"] for case in attention["cases"]} >= {"triton", "cpu"}
    assert {case["dtype"] for case in attention["cases"]} >= {"bfloat16", "float16", "float32"}
    assert attention["num_left_out"] == 0
    assert all(case["is_ok"] for case in attention["cases"] + results["rows"]["data"]["operations"])
    assert all(run["num_different"] == 0 for run in results["tokens"]["data"]["runs"])
    assert failures(results) == []


def test_every_combination_of_switches_runs_the_same_requests(results: dict[str, Any]) -> None:
    """Graphs and running ahead are switched by the names that the settings have for them."""
    assert len([name for name in PARTS if name.startswith("engine ")]) == 2 ** len(switches())
    plain = results["engine plain"]["data"]
    whole = results[engine_part(switches())]["data"]
    assert plain["switches"] == dict.fromkeys(switches(), False)
    assert whole["switches"] == dict.fromkeys(switches(), True)
    assert plain["num_finished"] == whole["num_finished"] == plain["num_requests"]
    assert plain["answers"] == whole["answers"]


def test_the_engine_and_transformers_do_the_same_work(results: dict[str, Any]) -> None:
    """Both end every request, and a step's cost is that of the model that was made."""
    plain, theirs = results["engine plain"]["data"], results["transformers"]["data"]
    assert theirs["num_finished"] == plain["num_finished"]
    shares = results["large step"]["data"]["steady"], plain["steady"]
    assert [steady["num_seqs"] for steady in shares] == [4, 4]
    assert all(0 <= steady["idle"] < 1 for steady in shares)
    assert shares[0]["flop"] > shares[1]["flop"]


def test_a_backend_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that is off by a tenth, and one that raises, fail their cases and nothing else."""

    class Off(CpuBackend):
        def attend(self, *args: Any, **options: Any) -> torch.Tensor:
            return super().attend(*args, **options) + 0.1

    class Broken(CpuBackend):
        def attend(self, *args: Any, **options: Any) -> torch.Tensor:
            raise OSError("no such kernel")

    made = {"off": Off, "broken": Broken, "cpu": CpuBackend}
    monkeypatch.setattr(conformance, "backends_for", lambda *need: made)
    result = run_part("attention", PARTS["attention"], Setup("cpu", True, 60.0, str(tmp_path)))
    table = dict(gpu_rows({"parts": {"attention": result}, "seconds": 1.0}))
    assert "wrong: groups of 2, bfloat16 (1.0e-01)" in table["attention: off against reference"]
    assert "OSError: no such kernel" in table["attention: broken against reference"]
    assert "wrong" not in table["attention: cpu against reference"]
    assert failures({"attention": result}) == ["attention"]


def test_a_row_kernel_that_is_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The operation is shown with its error."""

    class Off(TritonRowOps):
        def norm(self, *args: Any) -> torch.Tensor:
            return super().norm(*args) * 1.5

    monkeypatch.setattr(rows, "TritonRowOps", Off)
    result = run_part("rows", PARTS["rows"], Setup("cpu", True, 60.0, str(tmp_path)))
    table = dict(gpu_rows({"parts": {"rows": result}, "seconds": 1.0}))
    shown = table["rows: triton against torch"]
    assert shown.startswith("4 of 6 right")
    assert "wrong: norm (" in shown
    assert "norm of heads (" in shown
    assert failures({"rows": result}) == ["rows"]
