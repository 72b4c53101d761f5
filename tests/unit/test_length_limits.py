"""How long a sequence may be: the model's limit, with its reason where the rotation sets it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_worker.engine.errors import SettingsError
from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.settings import EngineSettings
from support.tiny_models import make_tiny_model

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}


def load(folder: Path, rope: dict[str, Any], **settings: Any) -> int:
    """Load a tiny model with this rope; return the length that the worker takes."""
    path = make_tiny_model(folder, "llama", rope_parameters=dict(rope))
    _, ready = load_engine(
        EngineSettings(model=str(path), device="cpu", kv_cache_memory_bytes=2**20, **settings)
    )
    return ready.max_model_len


@pytest.mark.parametrize(("rope", "limit"), [(DYNAMIC, 512), (LONGROPE, 64)], ids=str)
def test_a_longer_context_is_refused_with_the_reason(
    tmp_path: Path, rope: dict[str, Any], limit: int
) -> None:
    """Asking for more than the frequencies hold for names the limit and the rope type."""
    kind = rope["rope_type"]
    with pytest.raises(
        SettingsError, match=f"not in 2 … {limit}, .*: beyond it rope type '{kind}'"
    ):
        load(tmp_path, rope, max_model_len=limit + 1)


def test_the_limit_is_taken_unless_asked_otherwise(tmp_path: Path) -> None:
    """Without max_model_len, a longrope model takes sequences up to its original length."""
    assert load(tmp_path, LONGROPE) == 64
