"""A projection in eight bits on a CPU: sums of whole numbers, which no company rounds otherwise.

Weights have one scale an output, activations one scale a row, found anew for each row (Dettmers et
al., 2022, call it vector-wise quantization). Sums of whole numbers are exact in any order: a row
has the same bits in every batch, on every number of threads and on every kernel.
"""

from __future__ import annotations

from functools import cache

import torch

from headrace_worker.kernels import kernels_are_loaded
from headrace_worker.model.eight_bits import quantize_rows, scale_rows
from headrace_worker.model.linear import Product, has_matrix_unit

_LARGEST = 127  # both signs alike


def int8_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """Return the product of a filled weight by our kernel where it can be, else by oneDNN's."""
    if has_matrix_unit(weight.dtype):
        return Int8MatrixProduct(weight, bias)
    return Int8Product(weight, bias)


class Int8MatrixProduct:
    """The product on AMX by our own kernel, rounded once, to bfloat16."""

    __slots__ = ("_bias", "_packed", "_scales", "nbytes")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        numbers, self._scales = quantize_rows(weight)  # [out, in], [out] float32
        self._packed = torch.ops.headrace.pack_linear(numbers)
        self._bias = bias  # [out]
        self.nbytes = self._packed.nbytes + self._scales.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[num_tokens, out_features]`` of bfloat16 rows."""
        numbers, scales = torch.ops.headrace.quantize_rows(x)
        product: torch.Tensor = torch.ops.headrace.packed_linear_int8(
            numbers, scales, self._packed, self._scales, self._bias
        )
        return product


class Int8Product:
    """``x @ weight.T + bias`` for packed rows ``[num_tokens, in_features]``, about, by oneDNN."""

    __slots__ = ("_bias", "_scales", "_weight", "_zeros", "nbytes")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        numbers, self._scales = quantize_rows(weight)  # [out, in], [out] float32
        self._weight = torch.ops.onednn.qlinear_prepack(numbers, None)  # oneDNN's own layout
        self._zeros = torch.zeros(len(weight), dtype=torch.int32)  # [out], where zero lies
        self._bias = bias  # [out]
        self.nbytes = numbers.nbytes + self._scales.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[num_tokens, out_features]`` in the dtype of ``x``."""
        if kernels_are_loaded():
            numbers, scales = torch.ops.headrace.quantize_rows(x)
        else:
            numbers, scales = quantize_rows(x)
        product = multiply_int8(numbers, self._weight, self._scales, self._zeros, x.dtype)
        if kernels_are_loaded():
            torch.ops.headrace.scale_rows(product, scales, self._bias)
            return product
        return scale_rows(product, scales, self._bias)


def multiply_int8(
    numbers: torch.Tensor,  # [num_rows, in] int8
    weight: torch.Tensor,  # [out, in], packed
    scales: torch.Tensor,  # [out] float32
    zeros: torch.Tensor,  # [out] int32
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the product, times the weight's scales, ``[num_rows, out]`` in ``dtype``."""
    product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        numbers, 1.0, 0, weight, scales, zeros, None, 1.0, 0, dtype, "none", [], ""
    )
    return product


@cache
def can_multiply_int8(dtype: torch.dtype) -> bool:
    """Whether this torch and CPU multiply whole numbers exactly, few rows and many.

    The operators are torch's own but not public. And a CPU without VNNI adds two products in
    sixteen bits, where the largest do not fit; so full numbers of one sign are tried, too.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-_LARGEST, _LARGEST + 1, (48, 96), generator=generator)
    rows = torch.randint(-_LARGEST, _LARGEST + 1, (80, 96), generator=generator)
    weight[0], rows[0] = _LARGEST, _LARGEST
    wanted = (rows @ weight.T).to(torch.float32).to(dtype)
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight.to(torch.int8), None)
        ones, zeros = torch.ones(48), torch.zeros(48, dtype=torch.int32)
        return all(
            torch.equal(
                multiply_int8(rows[:n].to(torch.int8), packed, ones, zeros, dtype), wanted[:n]
            )
            for n in (1, 2, 17, 64, 80)
        )
    except (AttributeError, RuntimeError, TypeError):
        return False
