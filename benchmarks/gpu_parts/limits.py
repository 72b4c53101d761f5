"""What the device is, and its two limits: a large copy and a large matrix product."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.gpu_parts.clock import seconds_of
from benchmarks.gpu_parts.models import dtype_of
from benchmarks.gpu_parts.setup import Setup, Sizes

_PACKAGES = ("torch", "triton", "transformers", "flash-attn", "flash-attn-3")


def limits(setup: Setup) -> dict[str, Any]:
    """Return the device's name, and what it copies and multiplies in a second."""
    device, dtype = torch.device(setup.device), dtype_of(setup)
    return {
        "device": _name(device),
        "memory_bytes": _memory_bytes(device),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "dtype": str(dtype).removeprefix("torch."),
        "copy_bytes_per_s": _copy_rate(setup.sizes, device),
        "product_flop_per_s": _product_rate(setup.sizes, dtype, device),
    }


def _copy_rate(sizes: Sizes, device: torch.device) -> float:
    """Return bytes read and written per second."""
    source = torch.ones(sizes.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), device, most_s=sizes.measure_s)
    return 2 * sizes.copy_bytes / seconds


def _product_rate(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> float:
    """Return multiplications and additions per second; zeros would need less power."""
    size = sizes.product_size
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    seconds = seconds_of(lambda: torch.mm(a, b, out=product), device, most_s=sizes.measure_s)
    return 2 * size**3 / seconds


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _memory_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
