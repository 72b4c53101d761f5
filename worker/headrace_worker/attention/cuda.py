"""What the CUDA backends ask of the device before anything is loaded."""

from __future__ import annotations

import torch

from headrace_worker.attention.base import AttentionNeed


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return a device's compute capability, such as (9, 0); ``None`` where torch sees no GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def device_obstacle(need: AttentionNeed, lowest: tuple[int, int]) -> str | None:
    """Say why the device will not do: it is no GPU, there is none, or it is too old."""
    if need.device.type != "cuda":
        return f"it runs on CUDA, not on {need.device.type!r}"
    capability = capability_of(need.device)
    if capability is None:
        return f"torch {torch.__version__} sees no GPU"
    if capability < lowest:
        wanted, found = (".".join(map(str, version)) for version in (lowest, capability))
        return f"it needs compute capability {wanted}, and {need.device} has {found}"
    return None
