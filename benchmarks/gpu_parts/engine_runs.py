"""The whole engine: throughput of many requests, the length of a step, and the GPU's idle time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from benchmarks.gpu_parts.clock import Deadline, wait_for
from benchmarks.gpu_parts.idle import idle_share
from benchmarks.gpu_parts.models import LARGE, SMALL, make_model
from benchmarks.gpu_parts.setup import Setup, requests
from benchmarks.roofline import shape_of
from benchmarks.systems.play import command
from benchmarks.workload import Item
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.settings import EngineSettings

_FIRST_SEQ_ID, _STEADY_SEQ_ID = 1_000, 1_000_000
_SHARE_FOR_THROUGHPUT = 0.6  # of a part's time
_STEADY_STEPS, _PROFILED_STEPS = 24, 12
_NUM_KEPT, _NUM_KEPT_TOKENS = 16, 32  # of the answers, to be compared between parts


@dataclass(slots=True)
class Run:
    """What the engine made of the requests; it grows step by step."""

    tokens: dict[int, list[int]] = field(default_factory=dict)  # by seq_id
    finished: set[int] = field(default_factory=set)  # seq_ids
    num_steps: int = 0
    elapsed_s: float = 0.0


def switches() -> tuple[str, ...]:
    """Return the settings that this engine has for graphs and for running one step ahead."""
    names = (each.name for each in fields(EngineSettings))
    return tuple(name for name in names if "graph" in name or "ahead" in name)


def engine(setup: Setup, on: Iterable[str]) -> dict[str, Any]:
    """Run the yardstick with these switches on and all others off, then steps of decodes alone."""
    device = torch.device(setup.device)
    running, found = _load(setup, SMALL, on)
    items = requests(setup.sizes)
    warm_up = [Item(item.prompt, 4) for item in items[:2]]
    play(running, warm_up, 1, Deadline(setup.part_s), device)  # compiles
    deadline = Deadline(_SHARE_FOR_THROUGHPUT * setup.part_s)
    run = play(running, items, _FIRST_SEQ_ID, deadline, device)
    return {
        **found,
        **_summary(run, items),
        "steady": _steady(setup, running, SMALL),
    }


def large_step(setup: Setup) -> dict[str, Any]:
    """Time steps of the larger model alone, with every switch on."""
    running, found = _load(setup, LARGE, switches())
    return {**found, "steady": _steady(setup, running, LARGE)}


def play(
    engine: Engine, items: Sequence[Item], first_id: int, deadline: Deadline, device: torch.device
) -> Run:
    """Run items until all have ended or time is up; what is unfinished then is dropped.

    Raises RuntimeError when the engine fails one.
    """
    run, started_s = Run(), time.perf_counter()
    seq_ids = range(first_id, first_id + len(items))
    for seq_id, item in zip(seq_ids, items, strict=True):
        engine.add(command(seq_id, item))
    while engine.has_work and deadline.left_s:
        _step(engine, run)
    wait_for(device)
    run.elapsed_s = time.perf_counter() - started_s
    engine.abort(set(seq_ids) - run.finished)
    while engine.has_work:
        engine.step()
    return run


def _step(engine: Engine, run: Run) -> None:
    outcome = engine.step()
    if outcome.failed:
        raise RuntimeError(f"the engine failed a request: {outcome.failed[0].message}")
    for token in outcome.tokens:
        run.tokens.setdefault(token.seq_id, []).append(token.token_id)
    run.finished.update(seq_id for seq_id, _ in outcome.finished)
    run.num_steps += 1


def _load(setup: Setup, model: str, on: Iterable[str]) -> tuple[Engine, dict[str, Any]]:
    turned = dict.fromkeys(switches(), False) | dict.fromkeys(on, True)
    sizes = setup.sizes
    settings = EngineSettings(
        model=str(make_model(setup, model)),
        device=setup.device,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        kv_cache_memory_bytes=sizes.kv_cache_bytes,
        enable_prefix_caching=False,
        **turned,  # type: ignore[arg-type]  # found by name
    )
    loaded, ready = load_engine(settings)
    return loaded, {
        "switches": turned,
        "attention_backend": ready.attention_backend,
        "dtype": ready.dtype,
        "num_blocks": ready.num_blocks,
        "load_s": ready.load_s,
    }


def _summary(run: Run, items: Sequence[Item]) -> dict[str, Any]:
    num_tokens = sum(map(len, run.tokens.values()))
    kept = range(_FIRST_SEQ_ID, _FIRST_SEQ_ID + min(_NUM_KEPT, len(items)))
    return {
        "output_tokens_per_s": num_tokens / run.elapsed_s,
        "num_output_tokens": num_tokens,
        "elapsed_s": run.elapsed_s,
        "num_steps": run.num_steps,
        "num_requests": len(items),
        "num_finished": len(run.finished),
        "answers": [run.tokens.get(seq_id, [])[:_NUM_KEPT_TOKENS] for seq_id in kept],
    }


def _steady(setup: Setup, engine: Engine, model: str) -> dict[str, Any]:
    """Time steps in which all places decode, and look at the GPU meanwhile."""
    sizes, device = setup.sizes, torch.device(setup.device)
    num_seqs, prompt_tokens = sizes.max_num_seqs, sizes.steady_prompt_tokens
    num_fills = -(-num_seqs * prompt_tokens // sizes.max_num_batched_tokens)
    num_outputs = 4 * num_fills + _STEADY_STEPS + _PROFILED_STEPS + 16
    prompt = [100 + place % 300 for place in range(prompt_tokens)]
    for place in range(num_seqs):
        engine.add(command(_STEADY_SEQ_ID + place, Item(prompt, num_outputs)))
    run = Run()
    while len(run.tokens) < num_seqs or min(map(len, run.tokens.values())) < 3:
        if run.num_steps > 4 * num_fills + _STEADY_STEPS:
            raise RuntimeError(f"{num_seqs} decodes do not run at once: is the KV cache too small?")
        _step(engine, run)
    num_before = sum(map(len, run.tokens.values()))
    wait_for(device)
    started_s = time.perf_counter()
    for _ in range(_STEADY_STEPS):
        _step(engine, run)
    wait_for(device)
    step_s = (time.perf_counter() - started_s) / _STEADY_STEPS
    num_keys = num_seqs * prompt_tokens + num_before + num_seqs * _STEADY_STEPS // 2
    found: dict[str, Any] = {
        "num_seqs": num_seqs,
        "step_s": step_s,
        **_cost(setup, model, num_seqs, num_keys),
    }
    found["idle"] = _look_idle(engine, run, device)
    if run.finished:
        raise RuntimeError("a decode ended while steps were timed")
    engine.abort(range(_STEADY_SEQ_ID, _STEADY_SEQ_ID + num_seqs))
    return found


def _look_idle(engine: Engine, run: Run, device: torch.device) -> float | str:
    """Return the idle share, or why it cannot be told: the rest of the part is worth keeping."""

    def steps() -> None:
        for _ in range(_PROFILED_STEPS):
            _step(engine, run)

    try:
        return idle_share(steps, device)
    except RuntimeError as error:
        return str(error)


def _cost(setup: Setup, model: str, num_seqs: int, num_keys: int) -> dict[str, float]:
    """Return what a step has to read and to compute, for the limits to be set beside it."""
    shape = shape_of(str(setup.model_folder(model)))
    return {
        "mean_keys": num_keys / num_seqs,
        "read_bytes": shape.weight_bytes + num_keys * shape.kv_bytes,
        "flop": num_seqs * (shape.layer_flop + shape.head_flop),
    }
