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
    writer = gguf.GGUFWriter(path, config.model_type)
    for key, value in {**_metadata(config), **(fields or {})}.items():
        if value is not None:
            _add_field(writer, f"{config.model_type}.{key}", value)
    _add_tokenizer(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _in_llama_cpp_order(name, tensor, config)
        _add_tensor(writer, _gguf_name(name), values, quantization)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, np.asarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(config: Any) -> dict[str, Any]:
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
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


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    prefix = ""
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        prefix = f"blk.{layer}."
    return f"{prefix}{_STEMS[stem]}.{kind}"


def _in_llama_cpp_order(name: str, tensor: torch.Tensor, config: Any) -> np.ndarray[Any, Any]:
    """Llama's query and key rows are stored so that rotated pairs are neighbours."""
    values = tensor.float().numpy()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    projection = name.split(".")[-2]
    if config.model_type != "llama" or projection not in heads:
        return values
    halves = values.reshape(heads[projection], 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any], quantization: str
) -> None:
    kind = gguf.GGMLQuantizationType[quantization if values.ndim > 1 else "F32"]
    writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
