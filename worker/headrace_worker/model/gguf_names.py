"""The architectures read from GGUF: their tensors' names, and how their rows and norms are kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """What a GGUF file's ``general.architecture`` means for its tensors."""

    model_type: str  # transformers' name of the family
    is_interleaved: bool = False  # query and key rows: a rotated pair is side by side
    are_norms_shifted: bool = False  # norms are stored as the factor, 1 + weight
    names: Mapping[str, str] = field(default_factory=dict)  # where they differ from Llama's

    def translate(self, name: str) -> str:
        """Return transformers' name of a tensor; one that has none keeps its own."""
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        if match is None:
            return name
        layer, stem, kind = match.groups()
        if layer is None:
            return f"{_TOP_LEVEL[stem]}.{kind}" if stem in _TOP_LEVEL else name
        known = {**_IN_LAYER, **self.names}
        return f"model.layers.{layer}.{known[stem]}.{kind}" if stem in known else name


ARCHITECTURES = {
    "llama": GgufArchitecture("llama", is_interleaved=True),  # Mistral's files say llama, too
    "qwen2": GgufArchitecture("qwen2"),
    "qwen3": GgufArchitecture("qwen3"),
    "smollm3": GgufArchitecture("smollm3", is_interleaved=True),
    "phi3": GgufArchitecture(
        "phi3", names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
    "gemma2": GgufArchitecture("gemma2", are_norms_shifted=True, names=_GEMMA_NORMS),
    "gemma3": GgufArchitecture("gemma3_text", are_norms_shifted=True, names=_GEMMA_NORMS),
}
