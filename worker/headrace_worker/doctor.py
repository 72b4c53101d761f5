"""What this machine can serve: device, backend and model, as JSON for ``headrace doctor``.

``python -m headrace_worker.doctor --model NAME --device auto`` prints one list of findings. Nothing
is loaded but the model's metadata, so it is quick for models of any size.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.units import format_bytes
from headrace_worker.catalogue import CatalogueError, resolve

if TYPE_CHECKING:
    from headrace_worker.attention import AttentionNeed


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str  # what: device, backend, model
    ok: bool | None  # None: it cannot be told here
    detail: str  # what was found
    mend: str = ""  # what to do when it is not ok


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings; return 0 whatever they say, since saying it is the job."""
    parser = argparse.ArgumentParser("headrace doctor")
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    findings = [*_look_at_device(options.device), _look_at_model(options.model)]
    sys.stdout.write(json.dumps([asdict(finding) for finding in findings]) + "\n")
    return 0


def _look_at_device(name: str) -> Iterator[Finding]:
    import torch

    from headrace_worker.attention import AttentionNeed
    from headrace_worker.engine.errors import SettingsError
    from headrace_worker.engine.loader import choose_device, choose_dtype

    try:
        device = choose_device(name)
    except SettingsError as error:
        yield Finding("device", False, str(error), "give --device auto, or install a CUDA build")
        return
    dtype = str(choose_dtype("auto", device)).removeprefix("torch.")
    yield Finding("device", True, f"{_describe_device(device)}, {dtype}, torch {torch.__version__}")
    yield _look_at_backends(AttentionNeed(device, choose_dtype("auto", device)))


def _look_at_backends(need: AttentionNeed) -> Finding:
    """Say which backend will run, and what is in the way of the better ones."""
    from headrace_worker.attention import judge_backends

    passed_over: list[str] = []
    for verdict in judge_backends(need):
        if verdict.obstacle is None:
            instead = f" instead of {'; '.join(passed_over)}" if passed_over else ""
            return Finding("backend", True, f"{verdict.name}{instead}")
        passed_over.append(f"{verdict.name} ({verdict.obstacle})")
    return Finding("backend", False, f"none for {need.device.type}", "give --device cpu or cuda")


def _describe_device(device: object) -> str:
    import torch

    assert isinstance(device, torch.device)
    if device.type != "cuda":
        return f"{device.type}, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    return f"{device}, {properties.name}, {format_bytes(properties.total_memory)}"


def _look_at_model(name: str) -> Finding:
    from headrace_worker.model.errors import ModelLoadError
    from headrace_worker.model.source import locate_model

    try:
        path = locate_model(resolve(name)).path
        shape, is_proved = _describe_model(path)
    except CatalogueError as error:
        return Finding("model", False, str(error), "headrace pull lists the names that are known")
    except ModelLoadError as error:
        return Finding("model", False, f"{name}: {error}", "give --model another model")
    detail = f"{name} ({shape}, {format_bytes(_size_of(path))} on disk)"
    if is_proved:
        return Finding("model", True, detail)
    return Finding("model", None, f"{detail}; not tried here: its attention, which a worker checks")


def _describe_model(path: Path) -> tuple[str, bool]:
    """Return what is known of it, and if that proves that it runs; raises ModelLoadError if not."""
    from headrace_worker.model.config import (
        from_transformers,
        is_native,
        read_transformers_config,
    )
    from headrace_worker.model.gguf import GgufModel

    if path.suffix == ".gguf":
        config = GgufModel(path).config
    else:
        hf_config, eos_token_ids = read_transformers_config(path)
        if not is_native(hf_config.model_type):
            return _describe_external(hf_config), False
        config = from_transformers(hf_config, eos_token_ids)
    kv_values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return (
        f"{config.architecture}, {config.num_layers} layers, context "
        f"{config.max_position_embeddings}, {format_bytes(2 * kv_values)} of 16-bit KV a token"
    ), True


def _describe_external(hf_config: Any) -> str:
    """Say what is known before the weights are: the rest is checked when they are loaded."""
    from headrace_worker.model.external.refusals import choose_class

    name = choose_class(hf_config).__name__
    return (
        f"{hf_config.model_type}, transformers' own {name}, {hf_config.num_hidden_layers} layers, "
        f"context {hf_config.max_position_embeddings}"
    )


def _size_of(path: Path) -> int:
    files = path.rglob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


if __name__ == "__main__":
    sys.exit(main())
