"""Which attention backends exist, and which one a device gets when nobody names one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace_worker.attention.base import AttentionBackend, AttentionNeed, UnusableBackend
from headrace_worker.attention.cpu import CpuBackend
from headrace_worker.attention.flash import Flash2Backend, Flash3Backend
from headrace_worker.attention.native import NativeBackend
from headrace_worker.attention.reference import ReferenceBackend
from headrace_worker.attention.triton import TritonBackend


class UnknownBackend(ValueError):
    """The backend named does not run on the device; the message lists those that do."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one backend of a device's type can do what is needed."""

    name: str  # what --attention-backend takes
    title: str  # tells two versions of a name apart
    obstacle: str | None  # why it cannot; None: it can


# Best first; each runs on the device types given.
_BACKENDS: tuple[tuple[type[AttentionBackend], frozenset[str]], ...] = (
    (Flash3Backend, frozenset({"cuda"})),
    (Flash2Backend, frozenset({"cuda"})),
    (TritonBackend, frozenset({"cuda"})),
    (NativeBackend, frozenset({"cpu"})),
    (CpuBackend, frozenset({"cpu"})),
    (ReferenceBackend, frozenset({"cpu", "cuda"})),
)


def judge_backends(need: AttentionNeed) -> tuple[Verdict, ...]:
    """Return every backend for the device's type, best first, with what is in its way."""
    return tuple(
        Verdict(each.name, each.title(), each.obstacle(need)) for each in _candidates(need.device)
    )


def available_backends(device: torch.device | None = None) -> tuple[str, ...]:
    """Return the names of the backends that run on ``device`` (default: the CPU), best first."""
    need = AttentionNeed(torch.device("cpu") if device is None else device)
    return _usable(judge_backends(need))


def create_backend(
    name: str | None,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    head_dim: int | None = None,
) -> AttentionBackend:
    """Return a backend without a cache yet: ``name``, or the best one for ``device`` when ``None``.

    With ``dtype`` and ``head_dim`` of the model, a backend that cannot take them is passed over.

    Raises:
        UnknownBackend: no such backend runs on ``device``.
        UnusableBackend: the one named exists, and cannot take this device, dtype or head size.
    """
    need = AttentionNeed(device, dtype, head_dim)
    verdicts = judge_backends(need)
    for backend, verdict in zip(_candidates(device), verdicts, strict=True):
        if verdict.obstacle is None and name in (None, backend.name):
            return backend()
    available = f"available: {', '.join(_usable(verdicts))}"
    obstacles = [v.obstacle for v in verdicts if v.name == name and v.obstacle is not None]
    if obstacles:
        raise UnusableBackend(f"attention backend {name!r}: {'; '.join(obstacles)}; {available}")
    raise UnknownBackend(f"attention backend {name!r} does not run on {device.type!r}; {available}")


def _candidates(device: torch.device) -> tuple[type[AttentionBackend], ...]:
    return tuple(backend for backend, types in _BACKENDS if device.type in types)


def _usable(verdicts: tuple[Verdict, ...]) -> tuple[str, ...]:
    """Return the names without an obstacle; two versions of one backend share a name."""
    return tuple(dict.fromkeys(v.name for v in verdicts if v.obstacle is None))
