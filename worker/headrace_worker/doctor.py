"""What this machine can serve: model, device, backend and kernels, as JSON for ``headrace doctor``.

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
    import torch

    from headrace_worker.attention import AttentionNeed


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str  # what: device, backend, steps, row ops, quantization, model, ranks
    ok: bool | None  # None: it cannot be told here
    detail: str  # what was found
    mend: str = ""  # what to do when it is not ok


@dataclass(frozen=True, slots=True)
class _Model:
    """What is known of a model before its weights are read."""

    shape: str  # in words
    head_dim: int  # elements
    is_native: bool  # our own decoder runs it


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings; return 0 whatever they say, since saying it is the job."""
    parser = argparse.ArgumentParser("headrace doctor")
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--attention-backend")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(arguments)
    finding, model = _look_at_model(options.model)
    findings = [*_look_at_device(options, model), finding]
    if options.tensor_parallel_size > 1 and model is not None:
        findings.append(_look_at_ranks(options))
    sys.stdout.write(json.dumps([asdict(finding) for finding in findings]) + "\n")
    return 0


def _look_at_device(options: argparse.Namespace, model: _Model | None) -> Iterator[Finding]:
    import torch

    from headrace_worker.attention import AttentionNeed
    from headrace_worker.engine.errors import SettingsError
    from headrace_worker.engine.loader import choose_device, choose_dtype
    from headrace_worker.model.loading import DTYPES

    try:
        device = choose_device(options.device)
        dtype = choose_dtype(options.dtype, device)
    except SettingsError as error:
        mend = "give --device auto and --dtype auto, or install a CUDA build"
        yield Finding("device", False, str(error), mend)
        return
    described = f"{_describe_device(device)}, {_name_of(dtype)}, torch {torch.__version__}"
    takes = DTYPES.get(device.type, ())
    mend = f"give --dtype {' or '.join(map(_name_of, takes))}" if takes else "give --device auto"
    yield Finding("device", dtype in takes, described, mend)
    if dtype not in takes:
        return
    need = AttentionNeed(device, dtype, None if model is None else model.head_dim)
    backend = _look_at_backends(need, options.attention_backend)
    yield backend
    if device.type == "cuda" and backend.ok:
        yield _look_at_steps(need, options, is_native=model is None or model.is_native)
    if model is not None and model.is_native:
        yield _look_at_row_ops(dtype, device)
    if options.quantization != "none":
        is_native = model is None or model.is_native
        yield _look_at_quantization(options.quantization, dtype, device, is_native=is_native)


def _look_at_backends(need: AttentionNeed, wanted: str | None) -> Finding:
    """Say which backend will run, and what is in the way of the better ones, or of the one named.

    Two versions of a backend share a name; a title tells them apart.
    """
    from headrace_worker.attention import judge_backends

    verdicts = [each for each in judge_backends(need) if wanted in (None, each.name)]
    passed_over: list[str] = []
    for verdict in verdicts:
        if verdict.obstacle is None:
            title = verdict.title if verdict.title != verdict.name else ""
            chosen = " ".join([verdict.name, *filter(None, [title and f"({title})"])])
            instead = f" instead of {'; '.join(passed_over)}" if passed_over else ""
            return Finding("backend", True, f"{chosen}{_say_heads(need)}{instead}")
        passed_over.append(f"{verdict.name} ({verdict.obstacle})")
    if wanted is not None:
        found = "; ".join(passed_over) or f"{wanted!r} does not run on {need.device.type!r}"
        return Finding("backend", False, found, "leave --attention-backend out: the best is chosen")
    return Finding("backend", False, f"none for {need.device.type}", "give --device cpu or cuda")


def _look_at_steps(need: AttentionNeed, options: argparse.Namespace, *, is_native: bool) -> Finding:
    """Say how the GPU is kept busy, and why its decodes are not replayed from graphs."""
    from headrace_worker.attention import judge_backends
    from headrace_worker.engine.accelerator import graphs_obstacle

    names = [each.name for each in judge_backends(need) if each.obstacle is None]
    backend = options.attention_backend or names[0]  # the best that can
    size = options.tensor_parallel_size
    obstacle = graphs_obstacle(need.device, backend, is_native=is_native, num_ranks=size)
    if options.enforce_eager:
        obstacle = "--enforce-eager is given"
    pace = "scheduled one ahead" if options.async_scheduling else "one after the other"
    if obstacle is None:
        return Finding("steps", True, f"{pace}, decodes replayed from CUDA graphs")
    return Finding("steps", None, f"{pace}, without CUDA graphs: {obstacle}")


def _say_heads(need: AttentionNeed) -> str:
    if need.head_dim is None or need.dtype is None:
        return ""
    return f" for heads of {need.head_dim} in {_name_of(need.dtype)}"


def _look_at_row_ops(dtype: torch.dtype, device: torch.device) -> Finding:
    """Say what computes norms, activations and rotations; torch's operators always can."""
    from headrace_worker.model.row_ops import best_row_ops, row_kernel_obstacle

    name, obstacle = best_row_ops(dtype, device).name, row_kernel_obstacle(dtype, device)
    if obstacle is None:
        return Finding("row ops", True, f"{name}: one kernel each for norms, gates and rotations")
    return Finding("row ops", None, f"{name} instead of kernels ({obstacle})")


def _look_at_quantization(
    name: str, dtype: torch.dtype, device: torch.device, *, is_native: bool
) -> Finding:
    """Say whether the device multiplies in so few bits; small products are tried on it."""
    from headrace_worker.model.errors import ModelLoadError
    from headrace_worker.model.quantization import check_quantization

    mend = f"leave --quantization out: weights stay in {_name_of(dtype)}"
    if not is_native:
        detail = f"quantization {name!r} is for models of our own decoder only"
        return Finding("quantization", False, detail, mend)
    try:
        check_quantization(name, dtype, device)
    except ModelLoadError as error:
        return Finding("quantization", False, str(error), mend)
    detail = f"{name} in the projections of the layers, {_name_of(dtype)} in the head"
    return Finding("quantization", True, detail)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe_device(device: object) -> str:
    import torch

    assert isinstance(device, torch.device)
    if device.type != "cuda":
        return f"{device.type}, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    return f"{device}, {properties.name}, {format_bytes(properties.total_memory)}"


def _look_at_model(name: str) -> tuple[Finding, _Model | None]:
    """Return the finding, and the model itself where it can be described."""
    from headrace_worker.model.errors import ModelLoadError
    from headrace_worker.model.source import locate_model

    try:
        path = locate_model(resolve(name)).path
        model = _describe_model(path)
    except CatalogueError as error:
        mend = "headrace pull lists the names that are known"
        return Finding("model", False, str(error), mend), None
    except ModelLoadError as error:
        return Finding("model", False, f"{name}: {error}", "give --model another model"), None
    detail = f"{name} ({model.shape}, {format_bytes(_size_of(path))} on disk)"
    if model.is_native:
        return Finding("model", True, detail), model
    untried = f"{detail}; not tried here: its attention, which a worker checks"
    return Finding("model", None, untried), model


def _describe_model(path: Path) -> _Model:
    """Return what is known of it; raises ModelLoadError when it cannot run."""
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
            return _describe_external(hf_config)
        config = from_transformers(hf_config, eos_token_ids)
    kv_values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    shape = (
        f"{config.architecture}, {config.num_layers} layers, context "
        f"{config.max_position_embeddings}, {format_bytes(2 * kv_values)} of 16-bit KV a token"
    )
    return _Model(shape, config.head_dim, is_native=True)


def _describe_external(hf_config: Any) -> _Model:
    """Say what is known before the weights are: the rest is checked when they are loaded."""
    from headrace_worker.model.external.refusals import choose_class

    name = choose_class(hf_config).__name__
    shape = (
        f"{hf_config.model_type}, transformers' own {name}, {hf_config.num_hidden_layers} layers, "
        f"context {hf_config.max_position_embeddings}"
    )
    sizes = hf_config.hidden_size // hf_config.num_attention_heads
    return _Model(shape, getattr(hf_config, "head_dim", None) or sizes, is_native=False)


def _look_at_ranks(options: argparse.Namespace) -> Finding:
    """Say where the ranks of the model would run, or why it cannot be cut over so many."""
    from headrace_worker.engine.errors import SettingsError
    from headrace_worker.engine.parallel import rank_device
    from headrace_worker.model.errors import ModelLoadError
    from headrace_worker.model.loading import check_ranks

    size = options.tensor_parallel_size
    try:
        check_ranks(resolve(options.model), "auto", size)
        devices = [str(rank_device(options.device, rank, size)) for rank in range(size)]
    except (ModelLoadError, SettingsError) as error:
        return Finding("ranks", False, str(error), "give another --tensor-parallel-size")
    return Finding("ranks", True, f"{size}, on {', '.join(devices)}")


def _size_of(path: Path) -> int:
    files = path.rglob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


if __name__ == "__main__":
    sys.exit(main())
