"""Root-mean-square normalization (Zhang and Sennrich, 2019), rounded where transformers rounds."""

from __future__ import annotations

import torch


class Norm:
    """Scales the last dimension to unit mean square, in float32, then by a learnt weight."""

    __slots__ = ("eps", "is_centred", "weight")

    def __init__(self, weight: torch.Tensor, eps: float, *, is_centred: bool) -> None:
        self.weight = weight  # [size]
        self.eps = eps
        self.is_centred = is_centred  # the factor is 1 + weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, normed, in its own dtype."""
        wide = x.float()
        inverse = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True).add_(self.eps))
        normed = wide * inverse
        if self.is_centred:
            # The product comes before the cast: 1 + weight would lose its digits in bfloat16.
            return (normed * (1.0 + self.weight.float())).to(x.dtype)
        return normed.to(x.dtype) * self.weight
