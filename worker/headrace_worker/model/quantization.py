"""Which products of eight bits a device has, and what is in the way of the others."""

from __future__ import annotations

from functools import partial

import torch

from headrace_worker.model.device_products import (
    FP8_MULTIPLICATION,
    INT8_MULTIPLICATION,
    DeviceProduct,
    multiplication_obstacle,
)
from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.int8 import can_multiply_int8, int8_product
from headrace_worker.model.linear import Quantize, has_matrix_unit

QUANTIZATIONS = ("none", "int8", "fp8")
_FP8_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
_ON_GPU = {"int8": INT8_MULTIPLICATION, "fp8": FP8_MULTIPLICATION}


def check_quantization(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ModelLoadError unless the device has the products, for weights that were in dtype."""
    if name not in QUANTIZATIONS:
        raise ModelLoadError(f"unknown quantization {name!r}; known: {', '.join(QUANTIZATIONS)}")
    if (obstacle := quantization_obstacle(name, dtype, device)) is not None:
        raise ModelLoadError(f"quantization {name!r}: {obstacle}")


def quantization_obstacle(name: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return what is in the way of one of ``QUANTIZATIONS`` on the device; None: nothing is."""
    if name == "none":
        return None
    if device.type == "cpu":
        return _cpu_obstacle(name, dtype)
    if device.type != "cuda":
        return f"it runs on cpu and cuda, not on {str(device)!r}"
    if name == "fp8" and (obstacle := _fp8_obstacle(dtype, device)) is not None:
        return obstacle
    return multiplication_obstacle(_ON_GPU[name], dtype, device)


def quantize_for(name: str, device: torch.device) -> Quantize:
    """Return what makes products of a quantization that ``check_quantization`` let pass."""
    if device.type == "cpu":
        return int8_product
    return partial(DeviceProduct, how=_ON_GPU[name])


def _cpu_obstacle(name: str, dtype: torch.dtype) -> str | None:
    if name != "int8":
        return "it runs on a GPU, not on a CPU, which has int8"
    is_exact = has_matrix_unit(dtype) or can_multiply_int8(dtype)
    return None if is_exact else "this CPU or torch is not exact"


def _fp8_obstacle(dtype: torch.dtype, device: torch.device) -> str | None:
    if dtype is torch.float32:
        return "its results have 16 bits; float32 weights do not go with it"
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_CAPABILITY:
        has, needs = (".".join(map(str, each)) for each in (capability, _FP8_CAPABILITY))
        return f"{device} has compute capability {has}, and it takes {needs} or more"
    return None
