"""Random models of published shapes, made where they are measured: nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts.setup import Setup

SMALL, LARGE = "Qwen3-0.6B", "Llama-3.1-8B"

_LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    SMALL: {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
    },
    LARGE: {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rope_parameters": _LLAMA_ROPE,
        "tie_word_embeddings": False,
    },
}
_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
_TINY_HEADS = {SMALL: 4, LARGE: 8}  # with the groups of the real ones


def shape_of(setup: Setup, name: str) -> dict[str, Any]:
    """Return the fields of a model's configuration, at the size of this run."""
    if not setup.is_tiny:
        return SHAPES[name]
    return {**SHAPES[name], **_TINY, "num_attention_heads": _TINY_HEADS[name]}


def dtype_of(setup: Setup) -> torch.dtype:
    """Return the dtype that the engine chooses there."""
    return torch.bfloat16 if torch.device(setup.device).type == "cuda" else torch.float32


def make_model(setup: Setup, name: str) -> Path:
    """Return the model's folder; its weights are drawn on the device unless they are there."""
    folder = setup.model_folder(name)
    if not (folder / "config.json").is_file():
        save_random(folder, shape_of(setup, name), dtype_of(setup), torch.device(setup.device))
    return folder


def save_random(
    folder: Path, shape: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """Write a model with drawn weights as safetensors; transformers draws them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    no_ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(**shape, **no_ends)
    factory: Any = AutoModelForCausalLM  # transformers leaves it untyped
    torch.manual_seed(0)
    with device:
        model = factory.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what is measured next finds all the memory free
