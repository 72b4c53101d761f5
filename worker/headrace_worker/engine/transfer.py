"""To and from a device without waiting: pinned memory on the way in, an event on the way out."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host; on CUDA that happens when the work before it is done."""
    if device.type != "cuda":
        return tensor.to(device)
    # From ordinary memory the host would have to wait for all that is queued. Torch keeps the
    # pinned copy until the device has read it.
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Tensors on their way to the host, in the order of the work that was queued before."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._is_there: torch.cuda.Event | None = None  # None: there was nothing to wait for
        if any(tensor.is_cuda for tensor in tensors):
            self._is_there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_there.record()

    def wait(self) -> list[torch.Tensor]:
        """Return them once they have arrived; what was queued later may still run."""
        if self._is_there is not None:
            self._is_there.synchronize()
        return self._tensors
