"""From a path to a decoder whose every weight is in place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headrace_worker.model.config import ModelConfig, read_config
from headrace_worker.model.decoder import Decoder
from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.gguf import GgufModel
from headrace_worker.model.safetensors_reader import SafetensorsReader
from headrace_worker.model.source import ModelFiles, locate_model
from headrace_worker.model.weights import TensorSource, fill, resolve_tying

_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    name: str  # what it was loaded as
    config: ModelConfig
    decoder: Decoder
    weights_bytes: int  # W of the memory equation

    def packed(self) -> LoadedModel:
        """Lay the weights out for speed, in place; ``decoder.parameters`` is over."""
        return replace(self, weights_bytes=self.weights_bytes + self.decoder.pack())


def load_model(
    source: str | Path, *, dtype: torch.dtype, device: torch.device, name: str | None = None
) -> LoadedModel:
    """Load the ``.gguf`` file, or the folder with safetensors or one GGUF file, at ``source``.

    Weights go straight into ``dtype`` on ``device``, one tensor at a time.

    Raises:
        ModelLoadError: there is no such model, it is damaged, or it needs what is not supported.
    """
    if dtype not in _DTYPES.get(device.type, ()):
        raise ModelLoadError(f"{dtype} is not supported on device {device.type!r}")
    files = locate_model(source)
    config, weights = _open(files)
    config = resolve_tying(config, weights)
    decoder = Decoder(config, dtype, device)
    fill(decoder, weights)
    return LoadedModel(name or files.name, config, decoder, decoder.weights_bytes)


def _open(files: ModelFiles) -> tuple[ModelConfig, TensorSource]:
    if files.is_gguf:
        model = GgufModel(files.path)
        return model.config, model
    return read_config(files.path), SafetensorsReader(files.path)
