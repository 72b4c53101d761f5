"""Loading a model that is known to be one of the decoder's own families."""

from __future__ import annotations

from pathlib import Path

import torch

from headrace_worker.model import Decoder, LoadedModel, ModelConfig, load_model


def load(source: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load ``source`` on the CPU."""
    torch.set_num_threads(1)
    return load_model(source, dtype=dtype, device=torch.device("cpu"))


def load_parameters(source: Path) -> dict[str, torch.Tensor]:
    """Load ``source`` in float32; return where each tensor went."""
    return decoder_of(load(source)).parameters()


def decoder_of(model: LoadedModel) -> Decoder:
    """Return the model's decoder, which is our own."""
    assert isinstance(model.decoder, Decoder)
    return model.decoder


def config_of(model: LoadedModel) -> ModelConfig:
    """Return the model's configuration, which is our own."""
    assert isinstance(model.config, ModelConfig)
    return model.config
