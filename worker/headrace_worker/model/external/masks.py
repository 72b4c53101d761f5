"""What a model's mask lets a token see: all before it, or a sliding window, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headrace_worker.model.errors import ModelLoadError

# (batch, head, query position, key position) → visible, over index tensors that broadcast
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class MaskShape:
    """A causal mask, in place of the tensor that transformers would build."""

    window: int | None  # tokens that a token sees, itself counted; None: all before it


def describe_mask(*, mask_function: MaskFunction, config: Any, **_: object) -> MaskShape:
    """Take the place of a mask function in transformers' interface; raises ModelLoadError."""
    return MaskShape(find_window(mask_function, config.max_position_embeddings))


def find_window(mask_function: MaskFunction, num_positions: int) -> int | None:
    """Return the sliding window in tokens, ``None`` if it covers ``num_positions``.

    The mask is read at its real size, of which a short trial run would only see a corner.

    Raises:
        ModelLoadError: the mask is no causal mask, with or without a sliding window.
    """
    position = torch.arange(num_positions)

    def visible(query: int) -> torch.Tensor:
        zero = torch.tensor(0)
        return mask_function(zero, zero, torch.tensor(query), position).expand(num_positions)

    last = num_positions - 1
    window = int(visible(last).sum())
    for query in (0, last // 3, last // 2, last - window // 2, last):
        age = query - position
        if not torch.equal(visible(query), (age >= 0) & (age < window)):
            raise ModelLoadError(
                "an attention mask that is neither causal nor a sliding window is not supported"
            )
    return None if window >= num_positions else window
