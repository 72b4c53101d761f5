"""Models in one GGUF file: metadata to configuration, tensors dequantized and put back in order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.quants import dequantize

from headrace_worker.gguf_file import GgufFile, StoredTensor
from headrace_worker.model.config import ModelConfig, from_values
from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.gguf_metadata import GgufMetadata
from headrace_worker.model.rope import RopeSpec
from headrace_worker.model.weights import take_parts

_ROPE_DIVISORS = "rope_freqs.weight"
_LONGROPE_FACTORS = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}

Array = np.ndarray[Any, np.dtype[np.float32]]


class GgufModel:
    """One opened GGUF file; tensors are dequantized to float32 when they are read."""

    def __init__(self, path: Path) -> None:
        """Map the file and read its metadata.

        Raises:
            ModelLoadError: the file is malformed, one of several parts, or not supported.
        """
        try:
            file = GgufFile(path)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot read {path}: {error}") from error
        metadata = GgufMetadata(file.fields)
        if metadata.field("split.count", 1) > 1:
            raise ModelLoadError(f"{path} is one of several parts; merge them first")
        self._architecture = metadata.architecture
        self._tensors = {self._architecture.translate(one.name): one for one in file.tensors}
        self.config = self._read_config(metadata)

    def names(self) -> Collection[str]:
        """Return transformers' names of the tensors; what has none keeps its GGUF name."""
        return self._tensors.keys()

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor in float32, rows in transformers' order."""
        values = _dequantize(self._tensors[name])
        if self._architecture.is_interleaved:
            if ".q_proj." in name:
                values = _restore_halves(values, self.config.num_heads)
            elif ".k_proj." in name:
                values = _restore_halves(values, self.config.num_kv_heads)
        if self._architecture.are_norms_shifted and name.endswith("norm.weight"):
            values = values - np.float32(1)
        return torch.from_numpy(values)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return tuple(self._tensors[name].shape)

    def read_parts(self, name: str, axis: int, parts: Sequence[range]) -> torch.Tensor:
        """Return these ranges of axis 0 or 1, end to end; the whole tensor is decoded for that."""
        return take_parts(self.read(name), axis, parts)

    def _read_config(self, metadata: GgufMetadata) -> ModelConfig:
        divisors = self._tensors.pop(_ROPE_DIVISORS, None)
        factors = self._longrope_factors() if self._architecture.model_type == "phi3" else {}
        vocab_size = self._tensor("model.embed_tokens.weight").shape[0]
        values = metadata.config_values(self._tensors.keys(), vocab_size, factors)
        config = from_values(self._architecture.model_type, values, metadata.eos_ids())
        if divisors is None:
            return config
        # Llama 3.1 and later: the long-context scaling is stored as a divisor for each frequency.
        scaled = tuple(_divided(rope, _dequantize(divisors)) for rope in config.ropes)
        return replace(config, ropes=scaled)

    def _longrope_factors(self) -> dict[str, list[float]]:
        if not any(name in self._tensors for name in _LONGROPE_FACTORS.values()):
            return {}
        tensors = {key: self._tensor(name) for key, name in _LONGROPE_FACTORS.items()}
        for name in _LONGROPE_FACTORS.values():
            del self._tensors[name]
        return {key: _dequantize(tensor).tolist() for key, tensor in tensors.items()}

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise ModelLoadError(f"the GGUF file lacks {name}")
        return self._tensors[name]


def _dequantize(tensor: StoredTensor) -> Array:
    try:
        values = dequantize(tensor.data, tensor.kind)
    except NotImplementedError as error:
        raise ModelLoadError(f"{tensor.name}: {error}") from error
    # What needs no decoding is a read-only view of the file; torch wants memory that it may write.
    return np.require(values, np.float32, "W")


def _divided(rope: RopeSpec | None, divisors: Array) -> RopeSpec | None:
    if rope is None:
        return None
    inv_freq = np.asarray(rope.inv_freq, dtype=np.float32)
    if divisors.shape != inv_freq.shape:
        raise ModelLoadError(f"{_ROPE_DIVISORS} has shape {divisors.shape}, not {inv_freq.shape}")
    scaled = tuple((inv_freq / divisors).tolist())
    return replace(rope, rope_type="llama3", inv_freq=scaled)


def _restore_halves(values: Array, num_heads: int) -> Array:
    """Undo the interleaving of a head's halves: rows 0, d/2, 1, d/2 + 1, ... become 0, 1, ..."""
    paired = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)
