"""Models in one GGUF file: metadata to configuration, tensors dequantized and put back in order."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from headrace_worker.model.config import ModelConfig, from_values
from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.rope import RopeSpec

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ROPE_FACTORS = "rope_freqs.weight"
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


class GgufModel:
    """One opened GGUF file; tensors are dequantized to float32 when they are read."""

    def __init__(self, path: Path) -> None:
        """Map the file and read its metadata.

        Raises:
            ModelLoadError: the file is malformed, one of several parts, or not supported.
        """
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ModelLoadError(f"cannot read {path}: {error}") from error
        self._architecture = str(self._field("general.architecture"))
        if self._architecture not in _ARCHITECTURES:
            raise ModelLoadError(
                f"GGUF architecture {self._architecture!r} is not supported; "
                f"supported: {', '.join(_ARCHITECTURES)}"
            )
        if self._field("split.count", 1) > 1:
            raise ModelLoadError(f"{path} is one of several parts; merge them first")
        self._tensors = {_translate(tensor.name): tensor for tensor in self._reader.tensors}
        self._factors = self._tensors.pop(_ROPE_FACTORS, None)
        self.config = self._read_config()

    def names(self) -> Collection[str]:
        """Return transformers' names of the tensors; what has none keeps its GGUF name."""
        return self._tensors.keys()

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor in float32, rows in transformers' order."""
        values = _dequantize(self._tensors[name])
        if self._architecture == "llama":
            # llama.cpp rotates neighbouring pairs: it stores this architecture's q and k reordered.
            if ".q_proj." in name:
                values = _restore_halves(values, self.config.num_heads)
            elif ".k_proj." in name:
                values = _restore_halves(values, self.config.num_kv_heads)
        return torch.from_numpy(values)

    def _read_config(self) -> ModelConfig:
        config = from_values(self._architecture, self._config_values(), self._eos_ids())
        if self._factors is None:
            return config
        # Llama 3.1 and later: the long-context scaling is stored as a divisor for each frequency.
        factors = _dequantize(self._factors)
        return replace(config, ropes=tuple(_divided(rope, factors) for rope in config.ropes))

    def _config_values(self) -> dict[str, Any]:
        heads = self._number("attention.head_count")
        values = {
            "vocab_size": int(self._tensor("model.embed_tokens.weight").shape[1]),
            "hidden_size": self._number("embedding_length"),
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "rope_parameters": self._rope_parameters(),
        }
        head_dim = self._number("attention.key_length", values["hidden_size"] // heads)
        rotated = self._number("rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise ModelLoadError(
                f"rotating {rotated} of {head_dim} head dimensions is not supported"
            )
        if self._architecture != "qwen2":
            values["head_dim"] = head_dim
            values["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self._tensors
        return values

    def _rope_parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = {"rope_theta": self._number("rope.freq_base", 10000.0)}
        scaling = self._field(f"{self._architecture}.rope.scaling.type", "none")
        parameters["rope_type"] = "default" if scaling == "none" else scaling
        if scaling != "none":
            parameters["factor"] = self._number("rope.scaling.factor")
        if scaling == "yarn":
            original = self._number("rope.scaling.original_context_length")
            parameters["original_max_position_embeddings"] = original
        return parameters

    def _eos_ids(self) -> tuple[int, ...]:
        fields = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        found = [int(self._field(name)) for name in fields if name in self._reader.fields]
        return tuple(dict.fromkeys(found))

    def _number(self, key: str, default: Any = None) -> Any:
        value = self._field(f"{self._architecture}.{key}", default)
        if not isinstance(value, int | float):
            raise ModelLoadError(
                f"GGUF field {self._architecture}.{key} is {value!r}, not one number"
            )
        return value

    def _field(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _tensor(self, name: str) -> ReaderTensor:
        if name not in self._tensors:
            raise ModelLoadError(f"the GGUF file lacks {name}")
        return self._tensors[name]


def _translate(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return name
    layer, stem, kind = match.groups()
    translated = _TOP_LEVEL.get(stem) if layer is None else _IN_LAYER.get(stem)
    if translated is None:
        return name
    return f"{translated}.{kind}" if layer is None else f"model.layers.{layer}.{translated}.{kind}"


def _dequantize(tensor: ReaderTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelLoadError(f"{tensor.name}: {error}") from error
    # The reader's arrays are read-only views of the file; torch wants memory of its own.
    return np.array(values, dtype=np.float32)


def _divided(
    rope: RopeSpec | None, factors: np.ndarray[Any, np.dtype[np.float32]]
) -> RopeSpec | None:
    if rope is None:
        return None
    inv_freq = np.asarray(rope.inv_freq, dtype=np.float32)
    if factors.shape != inv_freq.shape:
        raise ModelLoadError(f"{_ROPE_FACTORS} has shape {factors.shape}, not {inv_freq.shape}")
    scaled = tuple((inv_freq / factors).tolist())
    return replace(rope, rope_type="llama3", inv_freq=scaled)


def _restore_halves(
    values: np.ndarray[Any, np.dtype[np.float32]], num_heads: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Undo the interleaving of a head's halves: rows 0, d/2, 1, d/2 + 1, ... become 0, 1, ..."""
    paired = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)
