"""A small model in float32 on every backend of the device: the ids have to be the reference's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts.backends import REFERENCE
from benchmarks.gpu_parts.clock import Deadline
from benchmarks.gpu_parts.engine_runs import play, switches
from benchmarks.gpu_parts.models import SMALL, save_random, shape_of
from benchmarks.gpu_parts.setup import Setup
from benchmarks.workload import Item
from headrace_worker.attention import AttentionNeed, judge_backends
from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.settings import EngineSettings

_SIZES = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
_LENGTHS = (1, 3, 17, 40, 64, 5)  # tokens of the prompts
_NUM_OUTPUTS = 12
_CACHE_BYTES = 64 << 20


def tokens(setup: Setup) -> dict[str, Any]:
    """Return, for each backend and set of switches, how many ids are not the reference's."""
    folder = setup.model_folder("same-tokens")
    shape = shape_of(setup, SMALL) if setup.is_tiny else {**shape_of(setup, SMALL), **_SIZES}
    save_random(folder, shape, torch.float32, torch.device(setup.device))
    wanted = _answer(setup, folder, REFERENCE, is_on=False)
    runs = []
    for name in _names(torch.device(setup.device)):
        for is_on in (False, True)[: 2 if switches() else 1]:
            on = list(switches()) if is_on else []
            found: dict[str, Any] = {"backend": name, "switches": on}
            try:
                ids = _answer(setup, folder, name, is_on=is_on)
            except (RuntimeError, ValueError) as failure:
                found["failure"] = f"{type(failure).__name__}: {failure}"
            else:
                found["num_different"] = sum(a != b for a, b in zip(ids, wanted, strict=True))
            runs.append(found)
    return {"num_ids": len(wanted), "runs": runs}


def _names(device: torch.device) -> list[str]:
    verdicts = judge_backends(AttentionNeed(device, torch.float32, head_dim=16))
    return [verdict.name for verdict in verdicts if verdict.obstacle is None]


def _answer(setup: Setup, folder: Path, backend: str, *, is_on: bool) -> list[int]:
    """Return all ids, request after request; chunks and decodes share steps."""
    settings = EngineSettings(
        model=str(folder),
        device=setup.device,
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=24,
        kv_cache_memory_bytes=_CACHE_BYTES,
        attention_backend=backend,
        **dict.fromkeys(switches(), is_on),  # type: ignore[arg-type]  # found by name
    )
    engine, _ = load_engine(settings)
    items = [
        Item([(7 * place + length) % 500 for place in range(length)], _NUM_OUTPUTS)
        for length in _LENGTHS
    ]
    run = play(engine, items, 1, Deadline(setup.part_s), torch.device(setup.device))
    return [token_id for seq_id in sorted(run.tokens) for token_id in run.tokens[seq_id]]
