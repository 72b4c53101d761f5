"""The matrix product of every projection, packed for the CPU where that is possible."""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

from headrace_worker.model.row_counts import RowCounts, multiply_padded

# [out_features, in_features], number format, whether there is a bias
ProductShape = tuple[int, int, torch.dtype, bool]


class Linear:
    """``x @ weight.T + bias`` for packed rows ``[num_tokens, in_features]``.

    Packed, a row's result has the same bits whatever rows share the call.
    """

    __slots__ = ("_packed", "_row_counts", "bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight  # [out_features, in_features]; gone once packed
        self.bias = bias  # [out_features]
        self._packed: torch.Tensor | None = None  # the weight in oneDNN's own layout
        self._row_counts: RowCounts | None = None  # set together with _packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[num_tokens, out_features]``."""
        if self._row_counts is None:
            return functional.linear(x, self.weight, self.bias)
        parts = self._row_counts.parts(x.shape[0])
        if len(parts) == 1:
            return multiply_padded(self._multiply, x, parts[0].num_padded_rows)
        start, products = 0, []
        for part in parts:
            rows = x[start : start + part.num_rows]
            products.append(multiply_padded(self._multiply, rows, part.num_padded_rows))
            start += part.num_rows
        return torch.cat(products)

    @property
    def is_packed(self) -> bool:
        """Whether oneDNN has the weight in its own layout."""
        return self._packed is not None

    def pack(
        self, *, keep_weight: bool = False, known: dict[ProductShape, RowCounts] | None = None
    ) -> None:
        """Copy the filled weight into oneDNN's layout, where this CPU and torch have one.

        The weight itself is dropped then, unless ``keep_weight``. Projections that are given the
        same ``known`` share what is found out about their shapes.
        """
        if self.weight.device.type != "cpu" or not can_pack(self.weight.dtype):
            return
        packed = self._packed = pack_weight(self.weight)
        # Probed with a bias of zeros: a real one would drown what tells two kernels apart.
        zeros = None if self.bias is None else torch.zeros_like(self.bias)
        shape = (*self.weight.shape, self.weight.dtype, self.bias is not None)
        counts = RowCounts(lambda x: multiply_packed(x, packed, zeros), self.weight)
        self._row_counts = counts if known is None else known.setdefault(shape, counts)
        if not keep_weight:
            del self.weight

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        assert self._packed is not None
        return multiply_packed(x, self._packed, self.bias)


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
