"""What is refused by name: options that the decoder does not compute, whoever wrote them down."""

from __future__ import annotations

import re
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headrace_worker.model.activations import ACTIVATIONS
from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.families import FAMILIES

# A field that the family's class does not know is dropped by transformers without a word. If its
# name speaks of the computation, the model was meant to compute something else.
_TELLING = re.compile(
    "activation|adapter|alibi|attention|attn|bias|bidirectional|causal|chunk|clip|conv_|expert|"
    "interpolat|latent|layer_types|lora|moe|multiplier|mup|norm|parallel_|partial|qk|residual|"
    "rope|rotary|scal|sink|softcap|sparse|ssm|window|(^|_)(q|kv)_"
)
# max_window_layers qualifies sliding_window, which is refused itself where it is not known.
_HARMLESS = re.compile(
    "^_|dropout|pdrop|implementation|initializer|quantization_config|max_window_layers"
)
_SECOND_NAMES = {"sliding_window_size": "sliding_window"}  # harmless if both say the same


def refuse_family(model_type: str) -> None:
    """Raise ModelLoadError unless the decoder knows the model type."""
    if model_type not in FAMILIES:
        raise ModelLoadError(
            f"model type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
        )


def refuse_unsupported(hf_config: Any) -> None:
    """Raise ModelLoadError, naming the option, if the model needs what is never computed here."""
    refuse_family(hf_config.model_type)
    _refuse_architecture(hf_config)
    refuse_quantization(hf_config)
    _refuse_unknown_fields(hf_config)
    _refuse_options(hf_config)
    heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    if kv_heads < 1 or heads % kv_heads:
        raise ModelLoadError(f"{heads} attention heads are no multiple of {kv_heads} KV heads")


def refuse_quantization(hf_config: Any) -> None:
    """Raise ModelLoadError, naming the method, if the weights are quantized."""
    quantization = getattr(hf_config, "quantization_config", None)
    if quantization:
        method = dict(quantization).get("quant_method", "unknown")
        raise ModelLoadError(f"quantization method {method!r} is not supported")


def is_neutral(value: Any) -> bool:
    """Tell whether a value leaves a computation as it is: absent, off, zero or one of it."""
    if value is None or value is False or value in ("", [], {}):
        return True
    return not isinstance(value, bool) and value in (0, 1)


def _refuse_architecture(hf_config: Any) -> None:
    for architecture in hf_config.architectures or ():
        if not architecture.endswith("ForCausalLM"):
            raise ModelLoadError(f"architecture {architecture!r} does not generate text")
        expected = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[hf_config.model_type]
        if architecture.lower() != expected.lower():
            raise ModelLoadError(
                f"architecture {architecture!r} is not supported; "
                f"model type {hf_config.model_type!r} stands for {expected!r}"
            )


def _refuse_unknown_fields(hf_config: Any) -> None:
    default = type(hf_config)()
    family = FAMILIES[hf_config.model_type]
    for name, value in vars(hf_config).items():
        # A class keeps under "_name" what it has taken in and resolved into other fields.
        is_known = hasattr(default, name) or hasattr(default, f"_{name}")
        is_known |= name == "partial_rotary_factor" and family.partial_rotary
        is_known |= value == getattr(hf_config, _SECOND_NAMES.get(name, ""), None)
        if not is_known and _is_telling(name) and not is_neutral(value):
            raise ModelLoadError(
                f"{name} ({value!r}) is not supported for model type {hf_config.model_type!r}"
            )


def _refuse_options(hf_config: Any) -> None:
    activation = getattr(hf_config, FAMILIES[hf_config.model_type].activation_field)
    if activation not in ACTIVATIONS:
        raise ModelLoadError(
            f"activation {activation!r} is not supported, only {', '.join(ACTIVATIONS)}"
        )
    if getattr(hf_config, "use_bidirectional_attention", None):
        raise ModelLoadError("use_bidirectional_attention is not supported: tokens see the past")
    if hf_config.model_type == "gemma3_text" and hf_config.attn_logit_softcapping is not None:
        # transformers reads the field for this family and then does not apply it
        cap = hf_config.attn_logit_softcapping
        raise ModelLoadError(f"attn_logit_softcapping ({cap}) is not supported for 'gemma3_text'")


def _is_telling(name: str) -> bool:
    return bool(_TELLING.search(name)) and not _HARMLESS.search(name)
