"""The shape and the flags of a decoder, read from transformers' configuration and checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import (
    StrictDataclassClassValidationError,
    StrictDataclassFieldValidationError,
)
from transformers import AutoConfig

from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.rope import RopeSpec, resolve_rope

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the decoder needs to know of a model; no option beyond these is ever computed."""

    architecture: str  # transformers' model_type, one of the supported families
    vocab_size: int  # rows of the embedding; may exceed the tokenizer's vocabulary
    hidden_size: int
    intermediate_size: int  # width of the feed-forward layer
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int  # divides num_heads
    head_dim: int  # elements, even
    max_position_embeddings: int  # longest sequence in tokens that the positions are made for
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool  # the head is the embedding
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each query and key head before the rotation
    windows: tuple[int | None, ...]  # per layer: sliding window in tokens; None is full attention
    eos_token_ids: tuple[int, ...]  # any of them ends a sequence; generation_config.json wins


def read_config(folder: Path) -> ModelConfig:
    """Read ``config.json``; end-of-sequence ids come from ``generation_config.json`` if it has any.

    Raises:
        ModelLoadError: a file is missing or malformed, or the model needs what is not supported.
    """
    hf_config = _guarded(folder, lambda: AutoConfig.from_pretrained(folder, local_files_only=True))
    eos = _eos_ids(hf_config.eos_token_id)
    generation_file = folder / "generation_config.json"
    if generation_file.is_file():
        eos = _guarded(folder, lambda: _generation_eos_ids(generation_file)) or eos
    return from_transformers(hf_config, eos)


def from_values(
    model_type: str, values: dict[str, Any], eos_token_ids: tuple[int, ...]
) -> ModelConfig:
    """Build the configuration of ``model_type`` from the fields of its transformers class.

    Raises:
        ModelLoadError: a value is malformed, or the model needs what is not supported.
    """
    _check_family(model_type)
    hf_config = _guarded(model_type, lambda: AutoConfig.for_model(model_type, **values))
    return from_transformers(hf_config, eos_token_ids)


def from_transformers(hf_config: Any, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate a transformers configuration, in which all defaults of the family are resolved.

    Raises:
        ModelLoadError: an option is not supported; the message names it.
    """
    family = hf_config.model_type
    _refuse_unsupported(hf_config)
    head_dim = getattr(hf_config, "head_dim", None) or (
        hf_config.hidden_size // hf_config.num_attention_heads
    )
    attention_bias = bool(getattr(hf_config, "attention_bias", False))
    rope = resolve_rope(hf_config, head_dim)
    return ModelConfig(
        architecture=family,
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_layers=hf_config.num_hidden_layers,
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=hf_config.num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=rope.extend(hf_config.max_position_embeddings),
        rms_norm_eps=hf_config.rms_norm_eps,
        rope=rope,
        tie_word_embeddings=bool(hf_config.tie_word_embeddings),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(getattr(hf_config, "mlp_bias", False)),
        qk_norm=family == "qwen3",
        windows=_windows(hf_config),
        eos_token_ids=eos_token_ids,
    )


def _refuse_unsupported(hf_config: Any) -> None:
    _check_family(hf_config.model_type)
    for architecture in hf_config.architectures or ():
        if not architecture.endswith("ForCausalLM"):
            raise ModelLoadError(f"architecture {architecture!r} does not generate text")
    quantization = getattr(hf_config, "quantization_config", None)
    if quantization:
        method = dict(quantization).get("quant_method", "unknown")
        raise ModelLoadError(f"quantization method {method!r} is not supported")
    if hf_config.hidden_act != "silu":
        raise ModelLoadError(f"activation {hf_config.hidden_act!r} is not supported, only 'silu'")
    heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    if kv_heads < 1 or heads % kv_heads:
        raise ModelLoadError(f"{heads} attention heads are no multiple of {kv_heads} KV heads")


def _check_family(model_type: str) -> None:
    if model_type not in _FAMILIES:
        raise ModelLoadError(
            f"model type {model_type!r} is not supported; supported: {', '.join(_FAMILIES)}"
        )


def _windows(hf_config: Any) -> tuple[int | None, ...]:
    window = getattr(hf_config, "sliding_window", None)
    layer_types = getattr(hf_config, "layer_types", None)
    if layer_types is None:
        return (window,) * int(hf_config.num_hidden_layers)
    known = {"full_attention": None, "sliding_attention": window}
    for layer_type in layer_types:
        if layer_type not in known:
            raise ModelLoadError(f"layer type {layer_type!r} is not supported")
    return tuple(known[layer_type] for layer_type in layer_types)


def _generation_eos_ids(path: Path) -> tuple[int, ...]:
    generation = json.loads(path.read_text("utf-8"))
    if not isinstance(generation, dict):
        raise ValueError(f"{path.name} holds {generation!r}, not an object")
    return _eos_ids(generation.get("eos_token_id"))


def _eos_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list) else (value,)
    for token_id in ids:
        if not isinstance(token_id, int):
            raise ValueError(f"eos_token_id holds {token_id!r}, not a token id")
    return ids


def _guarded(source: object, read: Callable[[], Any]) -> Any:
    """Call ``read``; what transformers and json raise for bad input becomes a ModelLoadError."""
    try:
        return read()
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        ZeroDivisionError,
        StrictDataclassClassValidationError,
        StrictDataclassFieldValidationError,
    ) as error:
        raise ModelLoadError(f"cannot read the configuration of {source}: {error}") from error
