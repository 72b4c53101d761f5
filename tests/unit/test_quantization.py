"""Which eight bits a device takes; what it does not take is refused before a weight is read."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from headrace_worker import doctor
from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.model.device_products import FP8_MULTIPLICATION, INT8_MULTIPLICATION
from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.int8 import int8_product
from headrace_worker.model.quantization import (
    check_quantization,
    quantization_obstacle,
    quantize_for,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda:1")
TRIAL = "headrace_worker.model.quantization.multiplication_obstacle"
CAPABILITY = "torch.cuda.get_device_capability"


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_a_refusal_comes_before_the_model_is_looked_for(quantization: str) -> None:
    """A worker on a CPU that is told fp8 says so at once, not after it has read its weights."""
    settings = EngineSettings(model="/there/is/none", device="cpu", quantization=quantization)
    with pytest.raises(ModelLoadError, match=f"quantization '{quantization}'"):
        load_engine(settings)


def test_what_a_cpu_is_refused_names_what_it_has() -> None:
    """fp8 needs a GPU; int8 does not."""
    with pytest.raises(ModelLoadError, match="'fp8': it runs on a GPU, not on a CPU, which has in"):
        check_quantization("fp8", torch.bfloat16, CPU)
    check_quantization("none", torch.float16, CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("capability", "is_taken"), [((8, 6), False), ((8, 9), True)])
def test_fp8_is_for_gpus_of_ada_and_later(
    capability: tuple[int, int], is_taken: bool, dtype: torch.dtype
) -> None:
    """An older one is refused with its compute capability, and the one that is asked for."""
    with patch(CAPABILITY, return_value=capability), patch(TRIAL, return_value=None):
        obstacle = quantization_obstacle("fp8", dtype, GPU)
    assert (obstacle is None) == is_taken
    if obstacle is not None:
        assert obstacle == "cuda:1 has compute capability 8.6, and it takes 8.9 or more"


def test_fp8_does_not_go_with_float32() -> None:
    """Its results have sixteen bits, so whoever asked for float32 would not get it."""
    obstacle = quantization_obstacle("fp8", torch.float32, GPU)
    assert obstacle == "its results have 16 bits; float32 weights do not go with it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_a_gpu_cannot_multiply_is_refused_after_a_trial(dtype: torch.dtype) -> None:
    """The trial's own words are in the message, as on an old GPU."""
    reason = "torch 2 cannot multiply it here: CUBLAS_STATUS_NOT_SUPPORTED"
    with patch(TRIAL, return_value=reason) as trial:
        with pytest.raises(ModelLoadError, match=f"quantization 'int8': {reason}"):
            check_quantization("int8", dtype, GPU)
    trial.assert_called_once_with(INT8_MULTIPLICATION, dtype, GPU)


def test_another_device_is_refused_by_its_name() -> None:
    """Nobody has tried eight bits there."""
    obstacle = quantization_obstacle("int8", torch.float32, torch.device("mps"))
    assert obstacle == "it runs on cpu and cuda, not on 'mps'"


def test_each_device_gets_its_own_product() -> None:
    """Our kernel's or oneDNN's on a CPU, torch's operators on a GPU."""
    assert quantize_for("int8", CPU) is int8_product
    for name, how in (("int8", INT8_MULTIPLICATION), ("fp8", FP8_MULTIPLICATION)):
        chosen = quantize_for(name, GPU)
        assert isinstance(chosen, partial)
        assert chosen.keywords == {"how": how}


def look(capsys: pytest.CaptureFixture[str], quantization: str, model: str = "none") -> Any:
    """What the doctor of the worker package says of a quantization on a CPU."""
    options = ("--model", model, "--device", "cpu", "--dtype", "float32")
    assert doctor.main((*options, "--quantization", quantization)) == 0
    findings = json.loads(capsys.readouterr().out)
    return next((each for each in findings if each["name"] == "quantization"), None)


@pytest.mark.parametrize("is_exact", [True, False])
def test_the_doctor_says_whether_the_device_has_the_products(
    is_exact: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the words of a worker that would refuse to start; without the option it says nothing."""
    with patch("headrace_worker.model.quantization.can_multiply_int8", return_value=is_exact):
        found = look(capsys, "int8")
    assert found["ok"] == is_exact
    assert ("float32 in the head" if is_exact else "is not exact") in found["detail"]
    refused = look(capsys, "fp8")
    assert "'fp8': it runs on a GPU" in refused["detail"]
    assert refused["mend"] == "leave --quantization out: weights stay in float32"
    assert look(capsys, "none") is None


def test_the_doctor_refuses_eight_bits_for_models_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only our own decoder has them, as a worker would say."""
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    found = look(capsys, "int8", str(tmp_path))
    assert not found["ok"]
    assert found["detail"] == "quantization 'int8' is for models of our own decoder only"
