"""Writing a transformers model to one GGUF file the way llama.cpp's converter lays it out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize

from support.tiny_models import CHAT_END_ID, build_tiny_tokenizer

_STEMS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_STEMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OTHER_STEMS = {
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "gemma2": _GEMMA_STEMS,
    "gemma3": _GEMMA_STEMS,
}
_ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}  # where the names differ
_INTERLEAVED = ("llama", "smollm3")


def write_tiny_gguf(
    path: Path,
    model: Any,
    *,
    quantization: str = "F32",
    fields: dict[str, Any] | None = None,
    extra_tensors: dict[str, Any] | None = None,
) -> Path:
    """Write ``model`` with tokenizer to ``path``; its matrices are stored as ``quantization``.

    ``fields`` (without the architecture's prefix) override metadata; ``None`` removes one.
    """
    config = model.config
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_metadata(config), **(fields or {})}.items():
        if value is not None:
            _add_field(writer, f"{architecture}.{key}", value)
    _add_tokenizer(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _as_llama_cpp_keeps_it(name, tensor, config, architecture)
        _add_tensor(writer, _gguf_name(name, architecture), values, quantization)
    for name, values in {**_longrope_factors(config), **(extra_tensors or {})}.items():
        writer.add_tensor(name, np.asarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(config: Any) -> dict[str, Any]:
    head_dim = config.head_dim
    window = getattr(config, "sliding_window", None)
    keeps_window = config.model_type in ("phi3", "gemma2", "gemma3_text")
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.sliding_window": window or 0 if keeps_window else None,
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "vocab_size": config.vocab_size,
        **_rope_metadata(config),
    }


def _rope_metadata(config: Any) -> dict[str, Any]:
    """Gemma 3's local base is not written: it is the same in all models."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    kind = rope["rope_type"]
    is_phi = config.model_type == "phi3"
    return {
        "rope.dimension_count": int(config.head_dim * (rope.get("partial_rotary_factor") or 1)),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.scaling.type": "linear" if kind == "linear" else None,
        "rope.scaling.factor": float(rope["factor"]) if kind == "linear" else None,
        "rope.scaling.attn_factor": rope.get("attention_factor"),
        "rope.scaling.original_context_length": (
            config.original_max_position_embeddings if is_phi else None
        ),
    }


def _longrope_factors(config: Any) -> dict[str, Any]:
    kinds = ("short", "long") if config.rope_parameters.get("rope_type") == "longrope" else ()
    return {
        f"rope_factors_{kind}.weight": config.rope_parameters[f"{kind}_factor"] for kind in kinds
    }


def _add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_uint32(key, value)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = build_tiny_tokenizer()
    backend = tokenizer.backend_tokenizer
    tokens = tokenizer.convert_ids_to_tokens(list(range(backend.get_vocab_size())))
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    )
    merges = _merges(backend.to_str())
    writer.add_token_merges(merges)
    writer.add_eos_token_id(CHAT_END_ID)
    writer.add_pad_token_id(0)
    writer.add_chat_template(str(tokenizer.chat_template))


def _merges(serialized: str) -> list[str]:
    return [" ".join(pair) for pair in json.loads(serialized)["model"]["merges"]]


def _gguf_name(name: str, architecture: str) -> str:
    stem, kind = name.rsplit(".", 1)
    prefix = ""
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        prefix = f"blk.{layer}."
    stems = {**_STEMS, **_OTHER_STEMS.get(architecture, {})}
    return f"{prefix}{stems[stem]}.{kind}"


def _as_llama_cpp_keeps_it(
    name: str, tensor: torch.Tensor, config: Any, architecture: str
) -> np.ndarray[Any, Any]:
    """Llama's query and key rows are stored so that rotated pairs are neighbours.

    Gemma's norms are stored as the factor that they stand for, 1 + weight.
    """
    values = tensor.float().numpy()
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    projection = name.split(".")[-2]
    if architecture not in _INTERLEAVED or projection not in heads:
        return values
    halves = values.reshape(heads[projection], 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any], quantization: str
) -> None:
    kind = gguf.GGMLQuantizationType[quantization if values.ndim > 1 else "F32"]
    writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
