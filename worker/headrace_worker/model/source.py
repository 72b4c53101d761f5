"""Where a model's files are: a GGUF file, a folder, or a repository of the Hugging Face hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from headrace_worker.model.errors import ModelLoadError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files found for a model: either one GGUF file or a folder of safetensors."""

    name: str  # for logs and answers: the folder's or file's name, or the hub id
    path: Path  # a .gguf file, or a folder with config.json and safetensors

    @property
    def is_gguf(self) -> bool:
        """Whether one GGUF file holds everything."""
        return self.path.suffix == ".gguf"


def locate_model(source: str | Path) -> ModelFiles:
    """Find the files of ``source``: a path, or else an ``owner/name`` of the hub.

    A folder may hold safetensors or exactly one GGUF file.

    Raises:
        ModelLoadError: there is no such model, or it has no files that can be loaded.
    """
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"{path} is neither a folder nor a .gguf file")
        return ModelFiles(path.stem, path)
    if path.is_dir():
        return ModelFiles(path.resolve().name, _within(path))
    if _HUB_ID.fullmatch(str(source)):
        return ModelFiles(str(source), _within(_download(str(source))))
    raise ModelLoadError(f"no model at {str(source)!r}: no such file or folder, and no hub id")


def _within(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelLoadError(
            f"{folder} has no config.json and {len(files)} .gguf files; name the file to load"
        )
    return files[0]


def _download(repository: str) -> Path:
    try:
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ModelLoadError(f"cannot fetch {repository!r} from the hub: {error}") from error
