"""Tensors of a folder of safetensors files, one file or many with an index."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.weights import take_parts

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class SafetensorsReader:
    """A checkpoint in safetensors files; a tensor is mapped from disk when it is read."""

    def __init__(self, folder: Path) -> None:
        """Open every file that holds a tensor.

        Raises:
            ModelLoadError: no weights, a shard of the index is missing, a file is malformed, or two
                files hold a tensor of the same name.
        """
        self._owners: dict[str, Any] = {}  # the open file of each tensor, by its name
        for path in sorted(set(_paths(folder))):
            file = _open(path)
            for name in file.keys():  # noqa: SIM118
                if name in self._owners:
                    raise ModelLoadError(f"{path} holds {name}, and so does another file")
                self._owners[name] = file

    def names(self) -> Collection[str]:
        """Return the tensors' names, which are transformers' own."""
        return self._owners.keys()

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor as stored."""
        tensor: torch.Tensor = self._owners[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor; only the file's header is looked at."""
        return tuple(self._owners[name].get_slice(name).get_shape())

    def read_parts(self, name: str, axis: int, parts: Sequence[range]) -> torch.Tensor:
        """Return these ranges of axis 0 or 1, end to end; nothing else is read from disk."""
        return take_parts(self._owners[name].get_slice(name), axis, parts)


def _paths(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            shards = json.loads(index.read_text("utf-8"))["weight_map"].values()
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"{index} is no index of safetensors files: {error}") from error
        return [folder / Path(shard).name for shard in shards]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    raise ModelLoadError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
