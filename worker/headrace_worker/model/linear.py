"""The matrix product of every projection, packed for the CPU where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch.nn import functional

from headrace_worker.kernels import kernels_are_loaded
from headrace_worker.model.row_counts import RowCounts, multiply_padded

# [out_features, in_features], number format, whether there is a bias
ProductShape = tuple[int, int, torch.dtype, bool]


class Product(Protocol):
    """A weight and a bias in a layout of their own, and how rows are multiplied with them."""

    @property
    def nbytes(self) -> int:
        """Memory of the weight, scales included."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[num_tokens, out_features]`` of ``[num_tokens, in_features]``."""
        ...


# of a weight, [out_features, in_features], and a bias, [out_features]
Quantize = Callable[[torch.Tensor, torch.Tensor | None], Product]


class Linear:
    """``x @ weight.T + bias`` for packed rows ``[num_tokens, in_features]``.

    Packed, a row's result has the same bits whatever rows share the call.
    """

    __slots__ = ("_product", "bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight  # [out_features, in_features]; gone once packed
        self.bias = bias  # [out_features]
        self._product: Product | None = None  # None: not packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[num_tokens, out_features]``."""
        if self._product is None:
            return functional.linear(x, self.weight, self.bias)
        return self._product(x)

    @property
    def is_packed(self) -> bool:
        """Whether the weight is in a layout for this CPU."""
        return self._product is not None

    @property
    def nbytes(self) -> int:
        """Memory of the weight as it is now, in whatever form; a kept one counts as well."""
        kept = self.weight.nbytes if hasattr(self, "weight") else 0
        return kept + (0 if self._product is None else self._product.nbytes)

    def pack(
        self, *, keep_weight: bool = False, known: dict[ProductShape, RowCounts] | None = None
    ) -> None:
        """Copy the filled weight into our layout or oneDNN's, where this CPU has one.

        The weight itself is dropped then, unless ``keep_weight``. Projections that are given the
        same ``known`` share what is found out about their shapes.
        """
        if self.weight.device.type != "cpu":
            return
        if has_matrix_unit(self.weight.dtype):
            self._product = MatrixProduct(self.weight, self.bias)
        elif can_pack(self.weight.dtype):
            self._product = PackedProduct(self.weight, self.bias, {} if known is None else known)
        else:
            return
        if not keep_weight:
            del self.weight

    def quantize(self, quantize: Quantize) -> None:
        """Turn the filled weight into fewer bits; the weight itself is dropped then."""
        self._product = quantize(self.weight, self.bias)
        del self.weight


class MatrixProduct:
    """The product of a bfloat16 weight on AMX by our own kernel: no row count is special."""

    __slots__ = ("_bias", "_num_outputs", "_packed", "nbytes")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.headrace.pack_linear(weight)
        self._num_outputs = len(weight)
        self._bias = bias
        self.nbytes = self._packed.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[num_tokens, out_features]``."""
        product: torch.Tensor = torch.ops.headrace.packed_linear(
            x, self._packed, self._bias, self._num_outputs
        )
        return product


class PackedProduct:
    """The product of a weight in oneDNN's layout, at row counts that all have the same bits."""

    __slots__ = ("_bias", "_packed", "_row_counts", "nbytes")

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        known: dict[ProductShape, RowCounts],
    ) -> None:
        packed = self._packed = pack_weight(weight)
        self._bias = bias
        self.nbytes = weight.nbytes
        shape = (*weight.shape, weight.dtype, bias is not None)
        if shape not in known:
            # Probed with a bias of zeros: a real one would drown what tells two kernels apart.
            zeros = None if bias is None else torch.zeros_like(bias)
            known[shape] = RowCounts(lambda x: multiply_packed(x, packed, zeros), weight)
        self._row_counts = known[shape]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[num_tokens, out_features]``."""
        parts = self._row_counts.parts(x.shape[0])
        if len(parts) == 1:
            return multiply_padded(self._multiply, x, parts[0].num_padded_rows)
        start, products = 0, []
        for part in parts:
            rows = x[start : start + part.num_rows]
            products.append(multiply_padded(self._multiply, rows, part.num_padded_rows))
            start += part.num_rows
        return torch.cat(products)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return multiply_packed(x, self._packed, self._bias)


def has_matrix_unit(dtype: torch.dtype) -> bool:
    """Whether weights of the dtype are multiplied by our kernel on the CPU's matrix unit."""
    return (
        dtype is torch.bfloat16
        and kernels_are_loaded()
        and bool(torch.ops.headrace.has_matrix_unit())
    )


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
