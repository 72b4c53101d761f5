"""Drawing again on a device that may be short of memory: fewer rows at a time, where need be."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headrace_worker.engine.draw import Draw, draw_tokens


def draw_in_room(logits: torch.Tensor, draws: Mapping[int, Draw]) -> dict[int, int]:
    """Draw as ``draw_tokens`` does; a row that finds no memory even alone is not in the answer.

    Rows are drawn independently, so which of them are drawn at once changes no token.
    """
    try:
        return draw_tokens(logits, draws)
    except torch.OutOfMemoryError:
        pass  # only out here is nothing of the attempt alive
    if logits.device.type == "cuda":
        torch.cuda.empty_cache()
    rows = list(draws)
    if len(rows) == 1:
        return {}
    middle = len(rows) // 2
    halves = rows[:middle], rows[middle:]
    first, second = ({row: draws[row] for row in half} for half in halves)
    return draw_in_room(logits, first) | draw_in_room(logits, second)
