"""Tiny random models of architectures that have no native decoder, and what to expect of each."""

from __future__ import annotations

from typing import Any

import torch

from support.tiny_models import build_tiny_model

_ONE_FOR_EACH_HEAD = {"num_key_value_heads": 4}
_GPT = {**_ONE_FOR_EACH_HEAD, "intermediate_size": None}

# Name → transformers' model type and options; options that could be ignored are far from neutral.
EXTERNAL_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {**_GPT, "scale_attn_by_inverse_layer_idx": True}),
    "gpt-neox": ("gpt_neox", {**_ONE_FOR_EACH_HEAD, "tie_word_embeddings": False}),
    "opt": ("opt", {**_ONE_FOR_EACH_HEAD, "ffn_dim": 128, "word_embed_proj_dim": 32}),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.6,
            "logits_scaling": 4.0,
        },
    ),
    "cohere": ("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2-windows": (
        "cohere2",
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "starcoder2-window": ("starcoder2", {"sliding_window": 12}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "mixtral-window": ("mixtral", {"num_local_experts": 4, "sliding_window": 12}),
    "qwen3-moe": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
            "mlp_only_layers": [0],
        },
    ),
}
MIXTURES = ("mixtral-window", "qwen3-moe", "qwen2-moe")


@torch.no_grad()
def build_external_model(name: str) -> Any:
    """Return the random model; norms that go by another name than ``norm`` are near one, too."""
    family, options = EXTERNAL_MODELS[name]
    model = build_tiny_model(family, **options)
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1 and parameter_name.endswith("weight"):
            parameter.add_(not parameter_name.endswith("norm.weight"))
    return model
