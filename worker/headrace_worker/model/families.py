"""What a model type fixes by itself, without a field in its configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """The traits of one model type; the defaults are Llama's."""

    qkv_bias: bool = False  # query, key and value have biases whatever attention_bias says
    qk_norm: bool = False  # RMSNorm over each query and key head before the rotation
    centred_norms: bool = False  # a norm multiplies by 1 + weight, and does so in float32
    post_norms: bool = False  # attention and feed-forward are normed on their way out, too
    scaled_embedding: bool = False  # the embedding is multiplied by sqrt(hidden_size)
    fused_projections: bool = False  # checkpoints hold qkv_proj and gate_up_proj
    partial_rotary: bool = False  # partial_rotary_factor counts
    rope_by_layer_type: bool = False  # rope_parameters holds one set a layer type
    activation_field: str = "hidden_act"  # where the configuration names the activation


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "smollm3": Family(),
    "phi3": Family(fused_projections=True, partial_rotary=True),
    "gemma2": Family(
        centred_norms=True,
        post_norms=True,
        scaled_embedding=True,
        activation_field="hidden_activation",
    ),
    "gemma3_text": Family(
        qk_norm=True,
        centred_norms=True,
        post_norms=True,
        scaled_embedding=True,
        rope_by_layer_type=True,
        activation_field="hidden_activation",
    ),
}
