"""What a path holds: one GGUF file, or a folder of safetensors; the catalogue resolves names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace_worker.model.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files found for a model: either one GGUF file or a folder of safetensors."""

    name: str  # for logs and answers: the folder's name, or the file's without its suffix
    path: Path  # a .gguf file, or a folder with config.json and safetensors

    @property
    def is_gguf(self) -> bool:
        """Whether one GGUF file holds everything."""
        return self.path.suffix == ".gguf"


def locate_model(source: str | Path) -> ModelFiles:
    """Find the files at path ``source``; a folder holds safetensors or exactly one GGUF file.

    Raises:
        ModelLoadError: there is nothing at the path, or nothing that can be loaded.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return ModelFiles(path.resolve().name, _within(path))
    if not path.is_file():
        raise ModelLoadError(f"no model at {str(source)!r}: no such file or folder")
    if path.suffix != ".gguf":
        raise ModelLoadError(f"{path} is neither a folder nor a .gguf file")
    return ModelFiles(path.stem, path)


def _within(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelLoadError(
            f"{folder} has no config.json and {len(files)} .gguf files; name the file to load"
        )
    return files[0]
