"""The matrix product of every projection, packed for the CPU where that is possible."""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

# oneDNN takes another path, with other rounding, for a lone float32 row. With a second row beside
# it, a row's result has the same bits in a batch of any size.
_MIN_FLOAT32_ROWS = 2


class Linear:
    """``x @ weight.T + bias`` for packed rows ``[num_tokens, in_features]``."""

    __slots__ = ("_packed", "bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight  # [out_features, in_features]; gone once packed
        self.bias = bias  # [out_features]
        self._packed: torch.Tensor | None = None  # the weight in oneDNN's own layout

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[num_tokens, out_features]``."""
        if self._packed is None:
            return functional.linear(x, self.weight, self.bias)
        num_missing = _MIN_FLOAT32_ROWS - x.shape[0]
        if num_missing > 0 and x.dtype is torch.float32:
            padded = functional.pad(x, (0, 0, 0, num_missing))
            return multiply_packed(padded, self._packed, self.bias)[: x.shape[0]]
        return multiply_packed(x, self._packed, self.bias)

    @property
    def is_packed(self) -> bool:
        """Whether oneDNN has the weight in its own layout."""
        return self._packed is not None

    def pack(self, *, keep_weight: bool = False) -> None:
        """Copy the filled weight into oneDNN's layout, where this CPU and torch have one.

        The weight itself is dropped then, unless ``keep_weight``.
        """
        if self.weight.device.type != "cpu" or not can_pack(self.weight.dtype):
            return
        self._packed = pack_weight(self.weight)
        if not keep_weight:
            del self.weight


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch packs weights of the dtype, and multiplies them correctly.

    The operators are torch's own but not public, so they are tried before they are trusted.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    try:
        packed = pack_weight(weight)
        for num_rows in (1, 2, 17):
            x = torch.randn(num_rows, 32, generator=generator).to(dtype)
            wanted = functional.linear(x.float(), weight.float(), bias.float())
            got = multiply_packed(x, packed, bias).float()
            torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
    except (AssertionError, AttributeError, RuntimeError, TypeError):
        return False
    return True


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight`` in oneDNN's layout: opaque, about as large, only for multiply_packed."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def multiply_packed(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` for a packed weight."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def empty_linear(
    in_features: int, out_features: int, bias: bool, dtype: torch.dtype, device: torch.device
) -> Linear:
    """Allocate a projection that the loader fills."""
    return Linear(
        torch.empty(out_features, in_features, dtype=dtype, device=device),
        torch.empty(out_features, dtype=dtype, device=device) if bias else None,
    )
