"""What a configuration says that the transformers backend would compute wrongly."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.refusals import refuse_quantization

_LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
# "longrope" chooses its frequencies by the longest sequence in the batch, so a neighbour would
# change them; "dynamic" changes them only beyond max_position_embeddings.
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_HINDRANCES = (
    ("is_encoder_decoder", "an encoder-decoder"),
    ("add_cross_attention", "cross-attention"),
    ("alibi", "ALiBi (a bias by distance)"),
    ("num_kv_shared_layers", "layers that share keys and values"),
    ("kv_lora_rank", "latent attention (MLA)"),
)


def choose_class(hf_config: Any) -> Any:
    """Return transformers' class of causal models for a configuration.

    Raises:
        ModelLoadError: there is none, or it needs what is not supported; the message names it.
    """
    model_type = hf_config.model_type
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    if model_class is None:
        raise ModelLoadError(f"model type {model_type!r} has no causal model in transformers")
    name = model_class.__name__
    for architecture in hf_config.architectures or ():
        if architecture != name:
            raise ModelLoadError(f"architecture {architecture!r} is not supported, only {name!r}")
    if not model_class.is_backend_compatible():
        raise ModelLoadError(
            f"model type {model_type!r} is not supported:"
            f" {name} does not call its attention through transformers' interface"
        )
    _refuse_options(hf_config)
    return model_class


def _refuse_options(hf_config: Any) -> None:
    refuse_quantization(hf_config)
    parts = [name for name in hf_config.sub_configs if getattr(hf_config, name, None) is not None]
    if parts:
        raise ModelLoadError(
            f"model type {hf_config.model_type!r} is made of several models ({', '.join(parts)}),"
            " which is not supported"
        )
    for attribute, meaning in _HINDRANCES:
        if value := getattr(hf_config, attribute, None):
            raise ModelLoadError(f"{meaning} is not supported ({attribute} is {value!r})")
    for layer_type in getattr(hf_config, "layer_types", None) or ():
        if layer_type not in _LAYER_TYPES:
            raise ModelLoadError(f"layer type {layer_type!r} is not supported")
    for rope_type in _rope_types(hf_config):
        if rope_type not in _ROPE_TYPES:
            raise ModelLoadError(f"rope type {rope_type!r} is not supported")
    if not isinstance(getattr(hf_config, "max_position_embeddings", None), int):
        raise ModelLoadError("the configuration does not say max_position_embeddings")


def _rope_types(hf_config: Any) -> list[str]:
    """Return the rope types: of the model, or of each kind of layer where they differ."""
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    kinds = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    return [kind.get("rope_type", "default") for kind in kinds]
