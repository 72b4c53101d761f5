"""Load a model's tokenizer: from the cache, else from an export that is then kept there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from headrace.errors import ConfigurationError
from headrace.folders import cache_folder
from headrace_worker.serving.tokenizer import (
    CONFIG_FILE,
    FORMAT_VERSION,
    VOCABULARY_FILE,
    Tokenizer,
)

# All that AutoTokenizer may look at, in a folder.
_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "additional_chat_templates/*")
_EXPORT_TIMEOUT_S = 300.0


def load_tokenizer(model: Path, cache: Path | None = None) -> Tokenizer:
    """Return the tokenizer of a folder or .gguf file; blocks, for seconds the first time.

    Raises ConfigurationError with transformers' words where it cannot make one.
    """
    folder = tokenizer_folder(model, cache)
    if not (folder / CONFIG_FILE).is_file():
        _export(model, folder)
    return Tokenizer.from_folder(folder)


def tokenizer_folder(model: Path, cache: Path | None = None) -> Path:
    """Return where the tokenizer of a model is, once it was loaded."""
    return (cache or cache_folder() / "tokenizers") / fingerprint(model)


def fingerprint(model: Path) -> str:
    """Return a name that changes with any file the tokenizer is made of, and with its makers."""
    digest = blake2b(digest_size=16)
    for library in ("transformers", "tokenizers"):
        digest.update(f"{library} {version(library)}\0".encode())
    digest.update(f"form {FORMAT_VERSION}\0".encode())
    for file in _sources(model):
        stat = file.stat()
        digest.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _sources(model: Path) -> Iterator[Path]:
    model = model.resolve()
    if model.is_file():
        yield model
        return
    for pattern in _PATTERNS:
        yield from sorted(model.glob(pattern))


def _export(model: Path, folder: Path) -> None:
    """Export beside the final name, then rename: a killed export leaves nothing half done."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        _run(model, made)
        try:
            os.rename(made, folder)
        except OSError:
            # Another worker was first; what it made is the same. A broken one is replaced.
            if not (folder / CONFIG_FILE).is_file():
                shutil.rmtree(folder)
                os.rename(made, folder)


def _run(model: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "headrace_worker.serving.tokenizer_export"]
    try:
        done = subprocess.run(
            [*command, str(model.resolve()), str(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_EXPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(
            f"reading the tokenizer of {model} took more than {error.timeout:g} s"
        ) from error
    if done.returncode != 0 or not (folder / VOCABULARY_FILE).is_file():
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ConfigurationError(f"{model} has no tokenizer that can be used: {reason[0]}")
