"""Which attention backends exist, and which one a device gets when nobody names one."""

from __future__ import annotations

import torch

from headrace_worker.attention.base import AttentionBackend
from headrace_worker.attention.cpu import CpuBackend
from headrace_worker.attention.reference import ReferenceBackend


class UnknownBackend(ValueError):
    """The backend named does not run on the device; the message lists those that do."""


# Best first; each runs on the device types given.
_BACKENDS: tuple[tuple[type[AttentionBackend], frozenset[str]], ...] = (
    (CpuBackend, frozenset({"cpu"})),
    (ReferenceBackend, frozenset({"cpu", "cuda"})),
)


def available_backends(device: torch.device | None = None) -> tuple[str, ...]:
    """Return the names of the backends that run on ``device`` (default: the CPU), best first."""
    device_type = "cpu" if device is None else device.type
    return tuple(backend.name for backend, types in _BACKENDS if device_type in types)


def create_backend(name: str | None, device: torch.device) -> AttentionBackend:
    """Return a backend without a cache yet: ``name``, or the best one for ``device`` when ``None``.

    Raises:
        UnknownBackend: no such backend runs on ``device``.
    """
    names = available_backends(device)
    chosen = name if name is not None else next(iter(names), None)
    for backend, _ in _BACKENDS:
        if backend.name == chosen and chosen in names:
            return backend()
    raise UnknownBackend(
        f"attention backend {name!r} does not run on {device.type!r}; available: {', '.join(names)}"
    )
