"""Writing a config.json with changes and reading it as the worker does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace_worker.model import ModelConfig
from headrace_worker.model.config import read_config

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(folder: Path, generation: object | None = None, **changes: Any) -> ModelConfig:
    """Write config.json (and generation_config.json) with ``changes``, then read it."""
    (folder / "config.json").write_text(json.dumps({**BASE, **changes}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder)
