"""What cannot be cut over so many ranks is refused at the start, by setting and value."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_worker.engine.errors import SettingsError
from headrace_worker.engine.loader import make_current
from headrace_worker.engine.parallel import load_leading, rank_device
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.model.errors import ModelLoadError
from support.process_tree import children_of
from support.tiny_gguf import write_tiny_gguf
from support.tiny_models import build_tiny_model, make_tiny_llama, make_tiny_model


def settings_for(model: object, size: int, **options: Any) -> EngineSettings:
    """Return settings of an engine over so many ranks."""
    return EngineSettings(
        model=str(model), tensor_parallel_size=size, **{"device": "cpu", **options}
    )


def refusal(settings: EngineSettings) -> str:
    """Start an engine that cannot be; return why, once every rank is gone again."""
    before = children_of(os.getpid())
    losses: list[str] = []
    with pytest.raises((ModelLoadError, SettingsError)) as caught, ExitStack() as cleanup:
        load_leading(settings, losses.append, cleanup)
    assert not losses
    assert children_of(os.getpid()) == before
    return str(caught.value)


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    """In a folder as in a GGUF file."""
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", build_tiny_model())
    for model in (make_tiny_llama(tmp_path / "llama"), gguf):
        reason = refusal(settings_for(model, 3))
        assert reason == "tensor_parallel_size 3 does not divide 4 attention heads"


def test_a_model_that_runs_on_transformers_code_is_refused(tmp_path: Path) -> None:
    """Whether it has to, or was asked to."""
    olmo, llama = make_tiny_model(tmp_path / "olmo2", "olmo2"), make_tiny_llama(tmp_path / "llama")
    for settings in (settings_for(olmo, 2), settings_for(llama, 2, model_impl="transformers")):
        reason = "tensor_parallel_size 2 is for model_impl 'native' only"
        assert refusal(settings).startswith(reason)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, as far as torch is asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)


@pytest.mark.usefixtures("two_gpus")
def test_each_rank_has_the_gpu_of_its_number() -> None:
    """Where they are found and where they are asked for; on a CPU all share it."""
    for name in ("auto", "cuda"):
        assert [str(rank_device(name, rank, 2)) for rank in (0, 1)] == ["cuda:0", "cuda:1"]
    assert str(rank_device("cpu", 1, 2)) == "cpu"


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("size", "device", "reason"),
    [
        (4, "cuda", "tensor_parallel_size 4 is more than the 2 CUDA devices"),
        (2, "cuda:1", "device 'cuda:1' is one GPU, and tensor_parallel_size 2 takes cuda:0 to"),
    ],
)
def test_more_ranks_than_gpus_are_refused(size: int, device: str, reason: str) -> None:
    """By both numbers, or by the device that was named."""
    with pytest.raises(SettingsError, match=reason):
        rank_device(device, 0, size)


@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_cannot_add_up_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without NCCL is named before a rank waits for another."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(SettingsError, match=r"tensor_parallel_size 2 needs NCCL, which torch \d"):
        rank_device("cuda", 0, 2)


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda:1", ["cuda:1"]), ("cuda", []), ("cpu", [])]
)
def test_the_gpu_that_was_named_is_the_one_that_kernels_run_on(
    device: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams, events and Triton's launches are of the current one, whatever tensors are on."""
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    make_current(torch.device(device))
    assert chosen == expected
