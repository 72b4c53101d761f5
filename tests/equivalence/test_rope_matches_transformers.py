"""Every rope type computes what transformers computes, also beyond the original length (B43)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_worker.attention import create_backend
from headrace_worker.model import load_model
from headrace_worker.model.config import read_config
from support.packed import PackedRun
from support.tiny_models import build_tiny_model

CPU = torch.device("cpu")
ORIGINAL = 32  # tokens, a third of the prompt
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 100}


def factors(count: int) -> dict[str, list[float]]:
    """Return the factors of longrope for so many frequencies."""
    return {
        "short_factor": [1.0 + 0.1 * index for index in range(count)],
        "long_factor": [4.0 + index for index in range(count)],
    }


ROPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "default": ("llama", {"rope_type": "default"}, {}),
    "linear": ("llama", {"rope_type": "linear", "factor": 2.0}, {}),
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 2.0}, {}),
    "llama3": ("llama", LLAMA3, {}),
    "yarn": ("qwen2", YARN, {}),
    "yarn-factor": ("llama", {**YARN, "attention_factor": 1.3, "beta_fast": 16.0}, {}),
    "yarn-mscale": ("llama", {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9, "beta_slow": 2.0}, {}),
    "yarn-smooth": ("qwen3", {**YARN, "truncate": False}, {}),
    "longrope": ("llama", {**LONGROPE, **factors(8)}, {}),
    "longrope-partial": (
        "phi3",
        {**LONGROPE, **factors(6)},
        {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 100},
    ),
    "smollm3-yarn": ("smollm3", YARN, {}),
    "gemma2-linear": ("gemma2", {"rope_type": "linear", "factor": 8.0}, {}),
}


def save(folder: Path, rope: str) -> Any:
    """Save a tiny random model with this rope; return transformers' own."""
    torch.set_num_threads(1)
    family, parameters, options = ROPES[rope]
    rope_parameters = {"rope_theta": 5000.0, **parameters}
    model = build_tiny_model(family, rope_parameters=rope_parameters, **options)
    model.save_pretrained(folder)
    return model


def assert_matches(folder: Path, source: Any) -> None:
    """Compare the logits of a text three times the original length, computed in chunks."""
    model = load_model(folder, dtype=torch.float32, device=CPU)
    prompt = torch.randint(0, 320, (100,), generator=torch.Generator().manual_seed(0))
    (logits,) = PackedRun(model, create_backend(None, CPU), [prompt.tolist()]).prefill(17)
    with torch.no_grad():
        expected = source(prompt[None]).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rope", ROPES)
def test_logits_beyond_the_original_length(tmp_path: Path, rope: str) -> None:
    """Scaled positions give transformers' logits, within the original length and far beyond."""
    assert_matches(tmp_path, save(tmp_path, rope))


@pytest.mark.parametrize("rope", ROPES)
def test_the_old_fields_say_the_same(tmp_path: Path, rope: str) -> None:
    """rope_theta with rope_scaling means what rope_parameters means, also when it says "type"."""
    save(tmp_path, rope)
    expected = read_config(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    scaling = fields.pop("rope_parameters")
    fields["rope_theta"] = scaling.pop("rope_theta")
    if "partial_rotary_factor" in scaling:
        fields["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    for spelling in ("rope_type", "type"):
        named = {**scaling, spelling: ROPES[rope][1]["rope_type"]}
        if spelling == "type":
            del named["rope_type"]
        file.write_text(json.dumps({**fields, "rope_scaling": named}))
        assert read_config(tmp_path) == expected


def test_global_layers_of_gemma3_are_scaled(tmp_path: Path) -> None:
    """Gemma 3 stretches the positions of its global layers and leaves the local ones alone."""
    torch.set_num_threads(1)
    local = {"rope_type": "default", "rope_theta": 2000.0}
    far = {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0}
    parameters = {"sliding_attention": local, "full_attention": far}
    source = build_tiny_model("gemma3_text", rope_parameters=parameters)
    source.save_pretrained(tmp_path)
    assert_matches(tmp_path, source)
