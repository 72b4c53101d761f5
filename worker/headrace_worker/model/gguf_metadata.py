"""A GGUF file's metadata, translated to the fields of transformers' configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.gguf_names import ARCHITECTURES, GgufArchitecture
from headrace_worker.model.refusals import is_neutral

# Of these, the tensors say it already, or the value matters only beside another field.
_NEEDLESS_KEYS = (
    "vocab_size",
    "tensor_data_layout",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
)
# Layers of the one size of Gemma 2 and of Gemma 3 (27B) whose scores are scaled by width / heads.
_GEMMA_LAYERS_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}


class GgufMetadata:
    """The fields of one file, and which of them were read: what nobody reads may not matter."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """Read which architecture it is.

        Raises:
            ModelLoadError: the architecture is not supported.
        """
        self._fields = fields
        self._read_keys: set[str] = set()
        self._name = str(self.field("general.architecture"))
        if self._name not in ARCHITECTURES:
            raise ModelLoadError(
                f"GGUF architecture {self._name!r} is not supported; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )

    @property
    def architecture(self) -> GgufArchitecture:
        """What the architecture means for the tensors."""
        return ARCHITECTURES[self._name]

    def field(self, key: str, default: Any = None) -> Any:
        """Return the value under the whole ``key``."""
        self._read_keys.add(key)
        return self._fields.get(key, default)

    def eos_ids(self) -> tuple[int, ...]:
        """Return the ids that end a text or a turn."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        found = [int(self.field(key)) for key in keys if key in self._fields]
        return tuple(dict.fromkeys(found))

    def config_values(
        self,
        tensors: Collection[str],  # transformers' names
        vocab_size: int,
        factors: Mapping[str, list[float]],  # longrope's divisors: short_factor and long_factor
    ) -> dict[str, Any]:
        """Return the fields of the family's configuration.

        Raises:
            ModelLoadError: a field is missing or malformed, or is one that would be ignored.
        """
        values = self._llama_values(tensors, vocab_size)
        if self._name == "phi3":
            self._add_phi3(values, factors)
        elif self._name.startswith("gemma"):
            self._add_gemma(values)
        elif self._name != "qwen2":
            values["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in tensors
        self._refuse_unread_keys()
        return values

    def _llama_values(self, tensors: Collection[str], vocab_size: int) -> dict[str, Any]:
        heads, width = self._number("attention.head_count"), self._number("embedding_length")
        head_dim = self._number("attention.key_length", width // heads)
        if self._number("attention.value_length", head_dim) != head_dim:
            raise ModelLoadError(f"values of another size than keys ({head_dim}) are not supported")
        rotated = self._number("rope.dimension_count", head_dim)
        if rotated != head_dim and self._name != "phi3":
            raise ModelLoadError(f"rotating {rotated} of {head_dim} dimensions is not supported")
        return {
            "vocab_size": vocab_size,
            "hidden_size": width,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "head_dim": head_dim,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "lm_head.weight" not in tensors,
            "rope_parameters": self._rope_parameters(),
        }

    def _add_phi3(self, values: dict[str, Any], factors: Mapping[str, list[float]]) -> None:
        head_dim = values["head_dim"]
        rotated = self._number("rope.dimension_count", head_dim)
        rope = values["rope_parameters"]
        # Half a dimension more, so that rounding cannot lose one.
        rope["partial_rotary_factor"] = 1 if rotated == head_dim else (rotated + 0.5) / head_dim
        if factors:
            rope.update(rope_type="longrope", **factors)
            rope["attention_factor"] = self._number("rope.scaling.attn_factor", 1.0)
            original = self._number("rope.scaling.original_context_length")
            values["original_max_position_embeddings"] = original
        values["sliding_window"] = self._number("attention.sliding_window", 0) or None

    def _add_gemma(self, values: dict[str, Any]) -> None:
        is_scaled_by_width = (
            values["num_hidden_layers"] == _GEMMA_LAYERS_SCALED_BY_WIDTH[self._name]
        )
        width_per_head = values["hidden_size"] // values["num_attention_heads"]
        values["query_pre_attn_scalar"] = (
            width_per_head if is_scaled_by_width else values["head_dim"]
        )
        values["sliding_window"] = self._number("attention.sliding_window")
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            values[cap] = self.field(f"{self._name}.{cap}")
        default_period = 2 if self._name == "gemma2" else 6
        period = self._number("attention.sliding_window_pattern", default_period)
        values["layer_types"] = [
            "sliding_attention" if (index + 1) % period else "full_attention"
            for index in range(values["num_hidden_layers"])
        ]
        if self._name == "gemma3":
            local = {"rope_type": "default", "rope_theta": self._number("rope.freq_base_swa", 1e4)}
            far = values["rope_parameters"]
            values["rope_parameters"] = {"sliding_attention": local, "full_attention": far}

    def _rope_parameters(self) -> dict[str, Any]:
        default_base = 1e6 if self._name == "gemma3" else 1e4
        parameters: dict[str, Any] = {"rope_theta": self._number("rope.freq_base", default_base)}
        scaling = self.field(f"{self._name}.rope.scaling.type", "none")
        parameters["rope_type"] = "default" if scaling == "none" else scaling
        if scaling != "none":
            parameters["factor"] = self._number("rope.scaling.factor")
        if scaling == "yarn":
            original = self._number("rope.scaling.original_context_length")
            parameters["original_max_position_embeddings"] = original
            for beta in ("beta_fast", "beta_slow"):
                parameters[beta] = self.field(f"{self._name}.rope.scaling.yarn_{beta}")
        return parameters

    def _number(self, key: str, default: Any = None) -> Any:
        value = self.field(f"{self._name}.{key}", default)
        if not isinstance(value, int | float):
            raise ModelLoadError(f"GGUF field {self._name}.{key} is {value!r}, not one number")
        return value

    def _refuse_unread_keys(self) -> None:
        needless = {f"{self._name}.{key}" for key in _NEEDLESS_KEYS}
        for key in self._fields.keys() - self._read_keys - needless:
            if key.startswith(f"{self._name}.") and not is_neutral(self.field(key)):
                raise ModelLoadError(f"GGUF field {key} ({self.field(key)!r}) is not supported")
