"""The doctor's judgement: what of a server and a machine is right, and what mends the rest."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.cli import doctor
from headrace.cli.doctor import Finding
from headrace_worker import doctor as worker_doctor
from headrace_worker.attention import AttentionNeed, available_backends, registry
from headrace_worker.attention.flash import Flash2Backend
from headrace_worker.attention.reference import ReferenceBackend
from headrace_worker.kernels import KernelStatus
from headrace_worker.model import row_ops
from support.tiny_models import make_tiny_llama

GOOD = {
    "redis_version": "7.0.15",
    "redis_mode": "standalone",
    "maxmemory_policy": "noeviction",
    "maxmemory": 0,
    "used_memory": 1000,
    "used_memory_human": "1K",
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
}


@pytest.mark.parametrize(
    ("versions", "ok"),
    [
        ({"redis_version": "7.0.0"}, True),
        ({"redis_version": "6.2.14"}, False),
        ({"redis_version": "10.1.0"}, True),
        ({"redis_version": "7.2.4", "valkey_version": "7.2.0"}, True),
        ({"redis_version": "7.2.4", "valkey_version": "7.1.9"}, False),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.2"}, True),
        ({}, False),
    ],
)
def test_a_server_below_the_floor_is_bad(versions: dict[str, str], ok: bool) -> None:
    """Redis 7.0 and Valkey 7.2 are the oldest; numbers are compared as numbers."""
    finding = doctor._version(versions)
    assert finding.ok is ok
    assert "upgrade to" in finding.mend


@pytest.mark.parametrize(
    ("look", "change", "ok", "mend"),
    [
        (doctor._eviction, {}, True, ""),
        (doctor._eviction, {"maxmemory_policy": "allkeys-lfu"}, False, "noeviction"),
        (doctor._persistence, {}, True, ""),
        (doctor._persistence, {"aof_enabled": 0}, False, "appendonly yes"),
        (doctor._persistence, {"aof_last_write_status": "err"}, False, "disk"),
        (doctor._memory, {}, None, ""),
        (doctor._memory, {"maxmemory": 10_000}, True, ""),
        (doctor._memory, {"maxmemory": 1_001}, False, "raise maxmemory"),
    ],
)
def test_each_setting_is_judged(
    look: Callable[[dict[str, Any]], Finding], change: dict[str, Any], ok: bool | None, mend: str
) -> None:
    """A wrong one comes with what to do."""
    finding = look({**GOOD, **change})
    assert finding.ok is ok
    assert mend in finding.mend


@pytest.mark.parametrize("ok", [True, None, False])
def test_only_what_is_wrong_shows_how_to_mend_it(
    ok: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A good line is one line."""
    doctor._show(Finding("thing", ok, "is so", "turn it"))
    shown = capsys.readouterr().out
    assert ("mend: turn it" in shown) is (ok is False)
    assert "thing" in shown


def look(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    """What the worker package finds, by name."""
    assert worker_doctor.main(arguments) == 0
    findings = json.loads(capsys.readouterr().out)
    return {finding["name"]: finding for finding in findings}


def test_the_device_and_its_backend_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """On this machine there is at least a CPU, and the best backend for it is the one shown."""
    found = look(capsys, "--model", "nothing", "--device", "cpu")
    assert found["device"]["detail"].startswith("cpu, ")
    assert found["backend"]["detail"].startswith(available_backends()[0])
    assert found["backend"]["ok"]


def stand_in_gpus(monkeypatch: pytest.MonkeyPatch, count: int, capability: tuple[int, int]) -> None:
    """Make torch tell of as many GPUs; nothing is run on them."""
    properties = SimpleNamespace(name="GPU", total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_why_a_better_backend_does_not_run_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever has no flash-attn, or a GPU too old for it, sees what runs instead, and why."""
    stand_in_gpus(monkeypatch, 1, (7, 5))
    findings = look(capsys, "--model", "nothing", "--device", "cuda")
    found = findings["backend"]
    assert found["ok"]
    assert found["detail"].startswith("reference instead of flash (flash-attn 3: it needs compute")
    assert "triton (Triton: it needs compute capability 8.0, and cuda has 7.5)" in found["detail"]
    assert findings["steps"]["ok"] is None
    assert findings["steps"]["detail"].endswith("attention by 'reference' waits for the device")


def test_how_steps_keep_a_gpu_busy_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Graphs go with attention that never waits for the device, on one GPU."""
    stand_in_gpus(monkeypatch, 2, (9, 0))
    flags = ("--model", "nothing", "--device", "cuda", "--attention-backend")
    steps = look(capsys, *flags, "triton")["steps"]
    assert (steps["ok"], steps["detail"]) == (
        True, "scheduled one ahead, decodes replayed from CUDA graphs",
    )  # fmt: skip
    ranks = look(capsys, *flags, "triton", "--tensor-parallel-size", "2")["steps"]
    assert ranks["detail"].endswith("without CUDA graphs: over 2 ranks they have not been tried")
    assert "steps" not in look(capsys, *flags, "nothing")
    plain = look(capsys, *flags, "triton", "--enforce-eager", "--no-async-scheduling")["steps"]
    assert plain["detail"] == "one after the other, without CUDA graphs: --enforce-eager is given"


class _FlashOnCpu(Flash2Backend):
    """flash-attn 2 as the doctor sees it on a GPU that runs it."""

    @classmethod
    def obstacle(cls, need: AttentionNeed) -> str | None:
        return "it takes heads of up to 8" if need.head_dim == 16 else None


def test_the_model_has_a_say_in_the_backend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Head size and dtype of the model that is named decide, and both are told."""
    make_tiny_llama(tmp_path / "tiny")
    pairs = ((_FlashOnCpu, frozenset({"cpu"})), (ReferenceBackend, frozenset({"cpu"})))
    monkeypatch.setattr(registry, "_BACKENDS", pairs)
    found = look(capsys, "--model", str(tmp_path / "tiny"), "--dtype", "bfloat16")["backend"]
    expected = "reference for heads of 16 in bfloat16 instead of flash (it takes heads of up to 8)"
    assert found["detail"] == expected
    assert look(capsys, "--model", "nothing")["backend"]["detail"] == "flash (flash-attn 2)"


@pytest.mark.parametrize(
    ("name", "ok", "detail"),
    [
        ("reference", True, "reference"),
        ("flash", False, "'flash' does not run on 'cpu'"),
    ],
)
def test_a_backend_that_is_named_is_judged_alone(
    name: str, ok: bool, detail: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is that one or none, as for a worker."""
    options = ("--model", "nothing", "--device", "cpu", "--attention-backend", name)
    found = look(capsys, *options)["backend"]
    assert (found["ok"], found["detail"]) == (ok, detail)


@pytest.mark.parametrize(
    ("dtype", "mend"),
    [("float16", "give --dtype float32 or bfloat16"), ("int4", "--dtype auto")],
)
def test_a_dtype_that_the_device_does_not_take_is_bad(
    dtype: str, mend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker would refuse it, so nothing more is said of the device."""
    found = look(capsys, "--model", "nothing", "--device", "cpu", "--dtype", dtype)
    assert not found["device"]["ok"]
    assert mend in found["device"]["mend"]
    assert "backend" not in found


@pytest.mark.parametrize("is_off", [False, True])
def test_what_computes_rows_is_told(
    is_off: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Kernels for a model of our own decoder where they are built, torch's operators otherwise."""
    make_tiny_llama(tmp_path / "tiny")
    status = KernelStatus("HEADRACE_KERNELS is off" if is_off else None, None)
    monkeypatch.setattr(row_ops, "load_kernels", lambda: status)
    monkeypatch.setattr(row_ops, "KernelRowOps", lambda: SimpleNamespace(name="kernels"))
    found = look(capsys, "--model", str(tmp_path / "tiny"), "--device", "cpu")["row ops"]
    assert found["ok"] is (None if is_off else True)
    wanted = "torch instead of kernels (HEADRACE_KERNELS is off)" if is_off else "kernels: one"
    assert found["detail"].startswith(wanted)


@pytest.mark.parametrize(
    ("size", "ok", "detail"),
    [
        ("2", True, "2, on cpu, cpu"),
        ("3", False, "tensor_parallel_size 3 does not divide 4 attention heads"),
    ],
)
def test_ranks_that_a_model_cannot_be_cut_over_are_bad(
    size: str, ok: bool, detail: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where they would run is told, and nothing at all of a single one."""
    options = ("--model", str(make_tiny_llama(tmp_path / "tiny")), "--device", "cpu")
    found = look(capsys, *options, "--tensor-parallel-size", size)["ranks"]
    assert (found["ok"], found["detail"]) == (ok, detail)
    assert "ranks" not in look(capsys, *options)


def test_a_device_that_is_not_there_is_bad(capsys: pytest.CaptureFixture[str]) -> None:
    """The finding names the device, and no backend is looked for."""
    found = look(capsys, "--model", "nothing", "--device", "cuda:77")
    assert not found["device"]["ok"]
    assert "cuda:77" in found["device"]["detail"]
    assert "backend" not in found


def test_a_model_is_described_without_being_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Architecture, layers, context and size come from its metadata."""
    make_tiny_llama(tmp_path / "tiny")
    found = look(capsys, "--model", str(tmp_path / "tiny"))["model"]
    assert found["ok"], found
    assert "llama" in found["detail"]
    assert "KV a token" in found["detail"]


@pytest.mark.parametrize(
    ("model_type", "ok", "named"),
    [
        ("gpt2", None, "transformers' own GPT2LMHeadModel, 2 layers, context 64"),
        ("gpt_oss", None, "not tried here: its attention, which a worker checks"),
        ("bloom", False, "BloomForCausalLM does not call its attention"),
    ],
)
def test_a_model_without_a_native_decoder_is_described_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model_type: str, ok: bool | None, named: str
) -> None:
    """Its configuration tells whether to try it, and not whether its attention is ours."""
    config = {"model_type": model_type, "num_hidden_layers": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    found = look(capsys, "--model", str(tmp_path))["model"]
    assert found["ok"] is ok
    assert named in found["detail"]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda folder: None, "no *.safetensors"),
        (lambda folder: (folder / "model.safetensors").touch(), "no config.json"),
        (lambda folder: (folder / "m.gguf").write_bytes(b"GGUF?"), "m.gguf"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_bad(
    make: Callable[[Path], Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty folder, half a model and a damaged file are told apart."""
    make(tmp_path)
    found = look(capsys, "--model", str(tmp_path))["model"]
    assert not found["ok"]
    assert named in found["detail"]
    assert found["mend"]


async def test_a_worker_package_that_does_not_start_is_bad(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its last line is the finding."""
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho ImportError: libtorch is broken >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    [finding] = await doctor._look_at_machine(["--model", "m"])
    assert finding.ok is False
    assert finding.detail == "ImportError: libtorch is broken"
