"""From a path to a decoder whose every weight is in place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace_worker.model.config import (
    ModelConfig,
    from_transformers,
    is_native,
    read_transformers_config,
)
from headrace_worker.model.decoder import Decoder
from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.quantization import check_quantization, quantize_for
from headrace_worker.model.ranks import ALONE, Ranks
from headrace_worker.model.safetensors_reader import SafetensorsReader
from headrace_worker.model.sharding import ShardedSource, shard_config
from headrace_worker.model.source import locate_model
from headrace_worker.model.weights import CuttableSource, TensorSource, fill, resolve_tying

if TYPE_CHECKING:  # it brings transformers' models, which most workers never need
    from headrace_worker.model.external import ExternalConfig, ExternalDecoder

MODEL_IMPLS = ("auto", "native", "transformers")
DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    name: str  # what it was loaded as
    config: ModelConfig | ExternalConfig  # of this rank's part, but for the vocabulary
    decoder: Decoder | ExternalDecoder
    weights_bytes: int  # W of the memory equation

    def packed(self, quantization: str = "none") -> LoadedModel:
        """Lay the weights out for speed, in place; ``decoder.parameters`` is over.

        Raises:
            ModelLoadError: ``quantization`` is not for this model, device or CPU.
        """
        if quantization == "none":
            return replace(self, weights_bytes=self.weights_bytes + self.decoder.pack())
        if not isinstance(self.decoder, Decoder):
            raise ModelLoadError(f"quantization {quantization!r} is for model_impl 'native' only")
        weight = self.decoder.embedding
        check_quantization(quantization, weight.dtype, weight.device)
        num_more_bytes = self.decoder.pack(quantize_for(quantization, weight.device))
        return replace(self, weights_bytes=self.weights_bytes + num_more_bytes)


def load_model(
    source: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    name: str | None = None,
    model_impl: str = "auto",
    ranks: Ranks = ALONE,
) -> LoadedModel:
    """Load the ``.gguf`` file, or the folder with safetensors or one GGUF file, at ``source``.

    Weights go straight into ``dtype`` on ``device``, one tensor at a time. ``model_impl`` says
    whose model code runs them: ``native``, ``transformers``, or ``auto``: native for its families.
    With several ``ranks``, each reads and holds its part of the weights.

    Raises:
        ModelLoadError: there is no such model, it is damaged, or it needs what is not supported.
    """
    if dtype not in DTYPES.get(device.type, ()):
        raise ModelLoadError(f"{dtype} is not supported on device {device.type!r}")
    if model_impl not in MODEL_IMPLS:
        raise ModelLoadError(f"unknown model_impl {model_impl!r}; known: {', '.join(MODEL_IMPLS)}")
    files = locate_model(source)
    title = name or files.name
    if files.is_gguf:
        if model_impl == "transformers":
            raise ModelLoadError(f"model_impl 'transformers' does not read GGUF: {files.path}")
        from headrace_worker.model.gguf import GgufModel  # its reader is for such files alone

        model = GgufModel(files.path)
        return _load_native(title, model.config, model, dtype, device, ranks=ranks)
    hf_config, eos_token_ids = read_transformers_config(files.path)
    if _runs_on_native(hf_config.model_type, model_impl):
        config = from_transformers(hf_config, eos_token_ids)
        reader = SafetensorsReader(files.path)
        return _load_native(title, config, reader, dtype, device, ranks=ranks)
    _refuse_to_cut_external(hf_config.model_type, ranks.size)
    from headrace_worker.model.external import load_external

    shape, decoder = load_external(files.path, hf_config, eos_token_ids, dtype=dtype, device=device)
    return LoadedModel(title, shape, decoder, decoder.weights_bytes)


def check_ranks(source: str | Path, model_impl: str, size: int) -> None:
    """Raise ModelLoadError unless ``load_model`` can cut the model over so many ranks."""
    files = locate_model(source)
    if files.is_gguf:
        from headrace_worker.model.gguf import GgufModel  # its reader is for such files alone

        shard_config(GgufModel(files.path).config, size)
        return
    hf_config, eos_token_ids = read_transformers_config(files.path)
    if not _runs_on_native(hf_config.model_type, model_impl):
        _refuse_to_cut_external(hf_config.model_type, size)
    shard_config(from_transformers(hf_config, eos_token_ids), size)


def _runs_on_native(model_type: str, model_impl: str) -> bool:
    return model_impl == "native" or (model_impl == "auto" and is_native(model_type))


def _refuse_to_cut_external(model_type: str, size: int) -> None:
    if size > 1:
        raise ModelLoadError(
            f"tensor_parallel_size {size} is for model_impl 'native' only, and model type"
            f" {model_type!r} would run on transformers' code"
        )


def _load_native(
    name: str,
    config: ModelConfig,
    weights: CuttableSource,
    dtype: torch.dtype,
    device: torch.device,
    *,
    ranks: Ranks,
) -> LoadedModel:
    config = resolve_tying(config, weights)
    part: TensorSource = weights
    if not ranks.is_alone:
        part = ShardedSource(weights, config, ranks)
        config = shard_config(config, ranks.size)
    decoder = Decoder(config, dtype, device, ranks)
    fill(decoder, part)
    return LoadedModel(name, config, decoder, decoder.weights_bytes)
