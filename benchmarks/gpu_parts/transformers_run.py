"""transformers' own continuous batching on the same weights and requests."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.gpu_parts.clock import Deadline
from benchmarks.gpu_parts.models import SMALL, dtype_of, make_model
from benchmarks.gpu_parts.setup import Setup, requests
from benchmarks.workload import Item

_LOOK_EVERY_S = 0.5
_TINY_CACHE = {"num_blocks": 32, "max_batch_tokens": 64}  # it would take all of a CPU's memory


def transformers_continuous(setup: Setup) -> dict[str, Any]:
    """Run the yardstick through its manager; tokens of what has ended by the deadline count."""
    import transformers
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    make_config: Any = GenerationConfig  # transformers leaves all three untyped
    make_cache: Any = ContinuousBatchingConfig
    factory: Any = AutoModelForCausalLM
    model = factory.from_pretrained(make_model(setup, SMALL), dtype=dtype_of(setup))
    model = model.to(torch.device(setup.device)).eval()
    cache = make_cache(**_TINY_CACHE) if setup.is_tiny else None
    items = requests(setup.sizes)
    with model.continuous_batching_context_manager(
        generation_config=make_config(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=cache,
        timeout=5,
    ) as manager:
        _run(manager, [Item(item.prompt, 4) for item in items[:2]], Deadline(setup.part_s))
        started_s = time.perf_counter()
        lengths = _run(manager, items, Deadline(setup.part_s))
        elapsed_s = time.perf_counter() - started_s
    return {
        "version": transformers.__version__,
        "output_tokens_per_s": sum(lengths) / elapsed_s,
        "num_requests": len(items),
        "num_finished": len(lengths),
        "elapsed_s": elapsed_s,
    }


def _run(manager: Any, items: list[Item], deadline: Deadline) -> list[int]:
    """Return the lengths of the outputs that ended in time; raises RuntimeError if it gives up."""
    for item in items:
        manager.add_request(item.prompt, max_new_tokens=item.num_output_tokens, eos_token_id=-1)
    lengths: list[int] = []
    while len(lengths) < len(items) and deadline.left_s:
        result = manager.get_result(timeout=_LOOK_EVERY_S)
        if result is not None and result.error:
            raise RuntimeError(result.error)
        if result is not None and result.is_finished():
            lengths.append(len(result.generated_tokens))
        if not manager.is_running():
            raise RuntimeError("its thread ended")
    return lengths
