"""transformers' ``generate`` in padded batches of 16: what one writes without an engine.

A batch runs until its longest answer is done, and only the tokens that were asked for count.
python -m benchmarks.peers.transformers_padded JOB RESULT
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from benchmarks.job import Job, Result, TokenTimes, run_as_child, summarize
from benchmarks.memory import PeakMemory
from benchmarks.peers.transformers_model import load, version
from benchmarks.workload import Item

BATCH_SIZE = 16
_PAD_ID = 0


class _Clock:
    """A stopping criterion that never stops, and notes when each position was there."""

    def __init__(self) -> None:
        self.stamps_s: list[float] = []  # one for each output token

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        import torch

        self.stamps_s.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def measure(job: Job) -> Result:
    """Load the model, warm up, run the workload."""
    with PeakMemory(os.getpid()) as memory:
        model = load(job)
        _run(model, job.warm_up, time.perf_counter())
        size = 1 if job.is_sequential else BATCH_SIZE
        start_s = time.perf_counter()
        times: list[TokenTimes] = []
        for first in range(0, len(job.items), size):
            sent_s = time.perf_counter() if job.is_sequential else start_s
            times += _run(model, job.items[first : first + size], sent_s)
        elapsed_s = time.perf_counter() - start_s
    return summarize(
        job,
        times,
        system="transformers, padded generate",
        version=version(),
        elapsed_s=elapsed_s,
        peak_rss_bytes=memory.peak_bytes,
    )


def _run(model: Any, items: list[Item], arrived_s: float) -> list[TokenTimes]:
    import torch

    width = max(len(item.prompt) for item in items)
    padding = [width - len(item.prompt) for item in items]
    ids = [[_PAD_ID] * pad + item.prompt for pad, item in zip(padding, items, strict=True)]
    mask = [[0] * pad + [1] * (width - pad) for pad in padding]
    clock = _Clock()
    with torch.inference_mode():
        model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max(item.num_output_tokens for item in items),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=_PAD_ID,
            stopping_criteria=[clock],
        )
    stamps_s, wanted = clock.stamps_s, [item.num_output_tokens for item in items]
    return [TokenTimes(arrived_s, stamps_s[0], stamps_s[count - 1], count) for count in wanted]


if __name__ == "__main__":
    run_as_child(sys.argv[1:], measure)
