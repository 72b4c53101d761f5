"""Filling a decoder from a checkpoint: every parameter once, every tensor accounted for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from headrace_worker.model.config import ModelConfig
from headrace_worker.model.decoder import Decoder
from headrace_worker.model.errors import ModelLoadError

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
# Older checkpoints carry the rotary frequencies, which follow from the configuration.
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TensorSource(Protocol):
    """A checkpoint: named tensors, read one at a time."""

    def names(self) -> Collection[str]:
        """Return transformers' names of the tensors it holds."""

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU, in whatever dtype it is stored or decoded."""


class CuttableSource(TensorSource, Protocol):
    """A checkpoint of which a rank can read its part."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor without reading it."""

    def read_parts(self, name: str, axis: int, parts: Sequence[range]) -> torch.Tensor:
        """Return what lies within these ranges of axis 0 or 1, end to end."""


def take_parts(tensor: Any, axis: int, parts: Sequence[range]) -> torch.Tensor:
    """Return ranges of axis 0 or 1, end to end, of a tensor or a slice of a file."""
    taken = [
        tensor[part.start : part.stop] if axis == 0 else tensor[:, part.start : part.stop]
        for part in parts
    ]
    return taken[0] if len(taken) == 1 else torch.cat(taken, dim=axis)


def resolve_tying(config: ModelConfig, source: TensorSource) -> ModelConfig:
    """Decide whether the head is the embedding, as transformers does.

    A tied model that carries a head of its own stays tied only if both are equal.
    """
    names = source.names()
    if not config.tie_word_embeddings or not {_HEAD, _EMBEDDING} <= set(names):
        return config
    equal = torch.equal(source.read(_HEAD), source.read(_EMBEDDING))
    return replace(config, tie_word_embeddings=equal)


def fill(decoder: Decoder, source: TensorSource) -> None:
    """Copy every tensor of ``source`` into its place, converting to the decoder's dtype.

    Raises:
        ModelLoadError: a parameter stays unfilled, a tensor is unknown, or has another shape or a
            dtype that is no plain float.
    """
    parameters = decoder.parameters()
    pending = {_target(name, decoder.config): name for name in _wanted(source.names(), decoder)}
    _check_names(parameters.keys(), pending.keys())
    for target, name in pending.items():
        _copy(name, source.read(name), parameters[target])


def _wanted(names: Iterable[str], decoder: Decoder) -> list[str]:
    known = set(names)
    redundant = {_HEAD} if decoder.config.tie_word_embeddings and _EMBEDDING in known else set()
    return sorted(name for name in known - redundant if not name.endswith(_DERIVED_SUFFIX))


def _target(name: str, config: ModelConfig) -> str:
    """A tied model may store its one matrix under either name."""
    return _EMBEDDING if name == _HEAD and config.tie_word_embeddings else name


def _check_names(wanted: Collection[str], present: Collection[str]) -> None:
    missing, unknown = sorted(set(wanted) - set(present)), sorted(set(present) - set(wanted))
    if missing:
        hint = " (tie_word_embeddings is false, so it may not be left out)" * (_HEAD in missing)
        raise ModelLoadError(f"the checkpoint lacks {_some(missing)}{hint}")
    if unknown:
        raise ModelLoadError(f"the checkpoint holds tensors of no known use: {_some(unknown)}")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _copy(name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    if tensor.shape != parameter.shape:
        raise ModelLoadError(
            f"{name} has shape {tuple(tensor.shape)};"
            f" the configuration says {tuple(parameter.shape)}"
        )
    if tensor.dtype not in _WEIGHT_DTYPES:
        raise ModelLoadError(f"{name} is stored as {tensor.dtype}, which is not supported")
    parameter.copy_(tensor)
