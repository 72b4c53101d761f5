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
from headrace_worker.model.families import FAMILIES
from headrace_worker.model.refusals import refuse_family, refuse_unsupported
from headrace_worker.model.rope import RopeSpec, longest_sequence, resolve_ropes
from headrace_worker.model.windows import attention_windows


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
    activation: str  # of the feed-forward layer's gate, transformers' name
    ropes: tuple[RopeSpec | None, ...]  # per layer; None: this layer does not rotate
    tie_word_embeddings: bool  # the head is the embedding
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each query and key head before the rotation
    centred_norms: bool  # norms multiply by 1 + weight, in float32
    post_norms: bool  # attention and feed-forward are normed on their way out, too
    fused_projections: bool  # the checkpoint holds qkv_proj and gate_up_proj
    attention_scale: float  # multiplies the scores
    attention_soft_cap: float | None  # bounds the scores by cap * tanh(score / cap)
    logits_soft_cap: float | None  # bounds the logits likewise
    embedding_scale: float | None  # multiplies the embedding, once rounded to the dtype
    windows: tuple[int | None, ...]  # per layer: sliding window in tokens; None is full attention
    eos_token_ids: tuple[int, ...]  # any of them ends a sequence; generation_config.json wins

    @property
    def length_limit_reason(self) -> str | None:
        """Why no sequence may be longer than ``max_position_embeddings``, if the rope says so."""
        limited = [rope for rope in self.ropes if rope and rope.exact_positions is not None]
        if not limited:
            return None
        return (
            f"beyond it rope type {limited[0].rope_type!r} has other frequencies for all tokens, "
            "those already computed included"
        )


def read_config(folder: Path) -> ModelConfig:
    """Read ``config.json``; end-of-sequence ids come from ``generation_config.json`` if it has any.

    Raises:
        ModelLoadError: a file is missing or malformed, or the model needs what is not supported.
    """
    return from_transformers(*read_transformers_config(folder))


def read_transformers_config(folder: Path) -> tuple[Any, tuple[int, ...]]:
    """Return transformers' configuration of a folder of any family, and the end-of-sequence ids.

    Raises:
        ModelLoadError: a file is missing or malformed, or the model brings code of its own.
    """
    hf_config = _guarded(
        folder,
        lambda: AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False),
    )
    eos = _eos_ids(getattr(hf_config, "eos_token_id", None))
    generation_file = folder / "generation_config.json"
    if generation_file.is_file():
        eos = _guarded(folder, lambda: _generation_eos_ids(generation_file)) or eos
    return hf_config, eos


def is_native(model_type: str) -> bool:
    """Whether our own decoder runs this family."""
    return model_type in FAMILIES


def from_values(
    model_type: str, values: dict[str, Any], eos_token_ids: tuple[int, ...]
) -> ModelConfig:
    """Build the configuration of ``model_type`` from the fields of its transformers class.

    Raises:
        ModelLoadError: a value is malformed, or the model needs what is not supported.
    """
    refuse_family(model_type)
    hf_config = _guarded(model_type, lambda: AutoConfig.for_model(model_type, **values))
    return from_transformers(hf_config, eos_token_ids)


def from_transformers(hf_config: Any, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate a transformers configuration, in which all defaults of the family are resolved.

    Raises:
        ModelLoadError: an option is not supported; the message names it.
    """
    refuse_unsupported(hf_config)
    family = FAMILIES[hf_config.model_type]
    hidden_size, num_heads = hf_config.hidden_size, hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hidden_size // num_heads
    attention_bias = bool(getattr(hf_config, "attention_bias", False))
    ropes = resolve_ropes(hf_config, head_dim, family)
    return ModelConfig(
        architecture=hf_config.model_type,
        vocab_size=hf_config.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_layers=hf_config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=hf_config.num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=longest_sequence(ropes, hf_config.max_position_embeddings),
        rms_norm_eps=hf_config.rms_norm_eps,
        activation=getattr(hf_config, family.activation_field),
        ropes=ropes,
        tie_word_embeddings=bool(hf_config.tie_word_embeddings),
        qkv_bias=attention_bias or family.qkv_bias,
        output_bias=attention_bias,
        mlp_bias=bool(getattr(hf_config, "mlp_bias", False)),
        qk_norm=family.qk_norm,
        centred_norms=family.centred_norms,
        post_norms=family.post_norms,
        fused_projections=family.fused_projections,
        attention_scale=(getattr(hf_config, "query_pre_attn_scalar", None) or head_dim) ** -0.5,
        attention_soft_cap=getattr(hf_config, "attn_logit_softcapping", None),
        logits_soft_cap=getattr(hf_config, "final_logit_softcapping", None),
        embedding_scale=hidden_size**0.5 if family.scaled_embedding else None,
        windows=attention_windows(hf_config),
        eos_token_ids=eos_token_ids,
    )


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
        AttributeError,
        OSError,
        ValueError,
        TypeError,
        LookupError,
        ZeroDivisionError,
        StrictDataclassClassValidationError,
        StrictDataclassFieldValidationError,
    ) as error:
        raise ModelLoadError(f"cannot read the configuration of {source}: {error}") from error
