"""Where peers live: environments with exact versions, outside the project's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.job import Job
from benchmarks.peers import environments
from benchmarks.peers.environments import OPENVINO, TRANSFORMERS, VLLM, Environment
from benchmarks.systems.flags import worker_flags
from benchmarks.systems.registry import SYSTEMS, RunFailed, System
from benchmarks.workload import Item


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache folder of its own."""
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    return tmp_path


def _job(model: str = "fake", **options: object) -> Job:
    return Job(model, "mixed", [Item([1], 1)], [], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("environment", [VLLM, OPENVINO, TRANSFORMERS], ids=lambda e: e.name)
def test_environments_name_exact_versions(environment: Environment) -> None:
    """A peer's figures are those of one version, torch first."""
    assert environment.requirements[0].startswith("torch==")
    assert all(re.fullmatch(r"[\w\[\]-]+==[\w.+]+", line) for line in environment.requirements)


def test_environments_stand_under_the_cache_folder(cache: Path) -> None:
    """Each peer has a folder of its own, which cleaning the cache removes."""
    assert VLLM.folder == cache / "bench/vllm"
    assert len({e.folder for e in (VLLM, OPENVINO, TRANSFORMERS)}) == 3


def test_what_is_installed_is_not_installed_again(cache: Path) -> None:
    """With the versions written down nothing is run: there is no interpreter to run it."""
    VLLM.folder.mkdir(parents=True)
    (VLLM.folder / "installed.txt").write_text("\n".join(VLLM.requirements))
    VLLM.install()
    assert not VLLM.python.exists()


def test_a_folder_of_safetensors_is_taken_as_it_is(tmp_path: Path) -> None:
    """Only GGUF files are written down anew for the peers."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert environments.safetensors_model(str(tmp_path), "bfloat16") == tmp_path


def test_preloads_are_those_that_are_here(cache: Path) -> None:
    """Intel's OpenMP comes from vLLM's environment once it is installed."""
    assert "libiomp5" not in environments.preloads()
    (VLLM.folder / "lib").mkdir(parents=True)
    (VLLM.folder / "lib/libiomp5.so").write_bytes(b"")
    assert environments.preloads().endswith("lib/libiomp5.so")


def test_a_run_that_fails_says_why() -> None:
    """The end of what a run said is in the error."""
    with pytest.raises(RunFailed, match="No module named"):
        System("nobody", "benchmarks.systems.nobody").run(_job())


def test_every_system_is_a_module_of_the_benchmark() -> None:
    """What the registry starts exists."""
    root = Path(__file__).parents[2]
    for system in SYSTEMS.values():
        assert (root / (system.module.replace(".", "/") + ".py")).is_file()


def test_ours_run_with_the_settings_of_a_worker() -> None:
    """Engine alone and worker are told the same, and flags of the run win."""
    job = _job("smollm2-135m", worker_flags=["--max-num-seqs", "8"])
    assert worker_flags(job)[-2:] == ["--max-num-seqs", "8"]
