"""A graph without a GPU: it computes again, on the same inputs, into the same output."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace_worker.engine.graphs import Replay


class FakeCapture:
    """Captures by running once, and counts what is replayed."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # rows of each graph, as they were captured
        self.replayed: list[int] = []  # rows of each replay

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Replay:
        """Return what a recorded graph would be."""
        output = compute().clone()
        rows = len(output)
        self.sizes.append(rows)

        def replay() -> torch.Tensor:
            self.replayed.append(rows)
            with torch.inference_mode():
                return output.copy_(compute())

        return replay
