"""The matrix product of every projection: where packed or quantized weights will plug in."""

from __future__ import annotations

import torch
from torch.nn import functional

# MKL takes other paths, with other rounding, for very few float32 rows. Padding to this many makes
# a row's result the same in a small batch as in a large one, as far as MKL allows: with several
# threads it still splits some shapes by batch size. It makes a lone decode about twice as slow.
_MIN_FLOAT32_ROWS = 16


class Linear:
    """``x @ weight.T + bias`` for packed rows ``[num_tokens, in_features]``."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight  # [out_features, in_features]
        self.bias = bias  # [out_features]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[num_tokens, out_features]``."""
        num_missing = _MIN_FLOAT32_ROWS - x.shape[0]
        if num_missing > 0 and x.dtype is torch.float32 and x.device.type == "cpu":
            padded = functional.pad(x, (0, 0, 0, num_missing))
            return functional.linear(padded, self.weight, self.bias)[: x.shape[0]]
        return functional.linear(x, self.weight, self.bias)


def empty_linear(
    in_features: int, out_features: int, bias: bool, dtype: torch.dtype, device: torch.device
) -> Linear:
    """Allocate a projection that the loader fills."""
    return Linear(
        torch.empty(out_features, in_features, dtype=dtype, device=device),
        torch.empty(out_features, dtype=dtype, device=device) if bias else None,
    )
