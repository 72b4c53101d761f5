"""Choosing a backend: the best that can do what is needed, and a reason for each that cannot."""

from __future__ import annotations

import pytest
import torch

from headrace_worker.attention import (
    AttentionNeed,
    UnusableBackend,
    create_backend,
    judge_backends,
    registry,
)
from headrace_worker.attention.reference import ReferenceBackend

CPU = torch.device("cpu")


class SmallHeads(ReferenceBackend):
    """Takes heads of up to 64 elements."""

    name = "small"

    @classmethod
    def obstacle(cls, need: AttentionNeed) -> str | None:
        """Larger heads are too large."""
        is_large = need.head_dim is not None and need.head_dim > 64
        return f"head_dim {need.head_dim} is more than 64" if is_large else None


@pytest.fixture(autouse=True)
def _two_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = frozenset({"cpu"})
    backends = ((SmallHeads, everywhere), (ReferenceBackend, everywhere))
    monkeypatch.setattr(registry, "_BACKENDS", backends)


@pytest.mark.parametrize(("head_dim", "name"), [(64, "small"), (65, "reference"), (None, "small")])
def test_a_backend_that_cannot_take_the_model_is_passed_over(
    head_dim: int | None, name: str
) -> None:
    """The next best one is taken; what is not known yet is in nobody's way."""
    assert create_backend(None, CPU, head_dim=head_dim).name == name


def test_a_backend_that_is_named_is_never_replaced() -> None:
    """Who asks for one by name gets it, or the reason and what there is instead."""
    assert create_backend("small", CPU, head_dim=8).name == "small"
    assert create_backend("reference", CPU, head_dim=8).name == "reference"
    reason = "'small': head_dim 80 is more than 64; available: reference"
    with pytest.raises(UnusableBackend, match=reason):
        create_backend("small", CPU, head_dim=80)


def test_every_backend_of_a_device_is_judged() -> None:
    """Best first, each with what is in its way."""
    verdicts = judge_backends(AttentionNeed(CPU, torch.float32, 128))
    assert [(v.name, v.obstacle) for v in verdicts] == [
        ("small", "head_dim 128 is more than 64"),
        ("reference", None),
    ]
