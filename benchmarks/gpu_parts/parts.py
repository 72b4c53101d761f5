"""The parts of the benchmark by name, and how one is run: an error is a result like any other."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import chain, combinations
from typing import Any

from benchmarks.gpu_parts.conformance import attention
from benchmarks.gpu_parts.engine_runs import engine, large_step, switches
from benchmarks.gpu_parts.kernels import decode, prefill
from benchmarks.gpu_parts.limits import limits
from benchmarks.gpu_parts.rows import rows
from benchmarks.gpu_parts.same_tokens import tokens
from benchmarks.gpu_parts.setup import Setup
from benchmarks.gpu_parts.transformers_run import transformers_continuous

Part = Callable[[Setup], dict[str, Any]]


def all_parts() -> dict[str, Part]:
    """Return them in the order in which they run: what is correct, what is fast, the engine."""
    return {
        "limits": limits,
        "attention": attention,
        "rows": rows,
        "tokens": tokens,
        "decode": decode,
        "prefill": prefill,
        **{engine_part(on): partial(engine, on=on) for on in _subsets(switches())},
        "transformers": transformers_continuous,
        "large step": large_step,
    }


def engine_part(on: tuple[str, ...]) -> str:
    """Return the name of the engine's part with these switches on."""
    return f"engine {' + '.join(on) or 'plain'}"


def run_part(name: str, part: Part, setup: Setup) -> dict[str, Any]:
    """Return what a part found under ``data``, or why it failed under ``error``."""
    started_s = time.perf_counter()
    try:
        result: dict[str, Any] = {"data": part(setup)}
    except Exception as error:  # whatever it is, the other parts are worth having
        traceback.print_exc(file=sys.stderr)
        result = {"error": f"{type(error).__name__}: {error}"}
    return {"part": name, **result, "seconds": time.perf_counter() - started_s}


def _subsets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return none, each alone, and so on up to all together."""
    return list(chain.from_iterable(combinations(names, size) for size in range(len(names) + 1)))
