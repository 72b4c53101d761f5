"""A projection in eight bits on a GPU: quantize, pad to what the operator takes, multiply, cut.

Weights have one scale an output, activations one scale a row, found anew for each row, as on a CPU.
Of several ranks each scales its own part of a row. torch's operators run on a CPU as well, where
the tests hold them to the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional

from headrace_worker.model.eight_bits import FP8, INT8, EightBits, Quantized, quantize_rows

_ROWS_AT_ONCE = 4096  # of a weight, so that few of them are wide at the same time

# of rows with a weight, [out, in], and a bias, [out]: [num_rows, out] in a dtype
Multiply = Callable[[Quantized, Quantized, torch.Tensor | None, torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True)
class DeviceMultiplication:
    """One of torch's operators for eight bits, and what it asks of its operands."""

    bits: EightBits
    multiply: Multiply
    least_rows: int  # it takes no fewer
    row_multiple: int  # the number of rows is a multiple of this
    size_multiple: int  # and in and out are multiples of this
    tolerance: float  # of a trial, as a share of its largest result; zero: it is exact


class DeviceProduct:
    """``x @ weight.T + bias`` for packed rows ``[num_tokens, in_features]``, about."""

    __slots__ = ("_bias", "_how", "_num_outputs", "_weight", "nbytes")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, how: DeviceMultiplication
    ) -> None:
        self._how = how
        self._num_outputs = len(weight)
        quantized = self._weight = _quantize_weight(weight, how)  # [out, in], both padded
        more_outputs = len(quantized.scales) - len(weight)
        self._bias = None if bias is None else functional.pad(bias, (0, more_outputs))
        self.nbytes = quantized.numbers.nbytes + quantized.scales.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[num_tokens, out_features]`` in the dtype of ``x``."""
        how = self._how
        num_rows = _round_up(max(len(x), how.least_rows), how.row_multiple)
        padded = _padded(x, num_rows, self._weight.numbers.shape[1])
        rows = Quantized(*quantize_rows(padded, how.bits))
        product = how.multiply(rows, self._weight, self._bias, x.dtype)
        return product[: len(x), : self._num_outputs].contiguous()


def multiply_whole(
    rows: Quantized, weight: Quantized, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply int8: the sums are exact in 32 bits, so a row has the same bits in any company."""
    product = torch._int_mm(rows.numbers, weight.numbers.T).float()
    product.mul_(weight.scales).mul_(rows.scales[:, None])
    return (product if bias is None else product.add_(bias)).to(dtype)


def multiply_fp8(
    rows: Quantized, weight: Quantized, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply e4m3: with scales by row, the operator's result is bfloat16 on every GPU."""
    product = torch._scaled_mm(
        rows.numbers,
        weight.numbers.T,
        scale_a=rows.scales[:, None],
        scale_b=weight.scales[None],
        bias=None if bias is None else bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,
    )
    return product.to(dtype)


def multiply_reference(
    rows: Quantized, weight: Quantized, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply what the numbers stand for, in float32: what both operators come near."""
    product = rows.values() @ weight.values().T
    return (product if bias is None else product + bias.float()).to(dtype)


# _int_mm takes more than sixteen rows, and cuBLAS likes eights.
INT8_MULTIPLICATION = DeviceMultiplication(INT8, multiply_whole, 17, 8, 8, 0.0)
FP8_MULTIPLICATION = DeviceMultiplication(FP8, multiply_fp8, 1, 1, 16, 2**-6)


@cache
def multiplication_obstacle(
    how: DeviceMultiplication, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why the operator cannot be trusted on the device; None after a trial that went well.

    The operators are torch's own but not public, so they are tried before they are trusted. The
    trial's values are whole numbers that both formats have, and each row's scale is one.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-8, 9, (48, 96), generator=generator).to(dtype)
    rows = torch.randint(-8, 9, (80, 96), generator=generator).to(dtype)
    weight[:, 0] = rows[:, 1] = how.bits.largest  # not the same: float16 ends at 65504
    wanted = (rows.float() @ weight.float().T).to(dtype).float()
    try:
        product = DeviceProduct(weight.to(device), None, how)
        for num_rows in (1, 2, 17, 64, 80):
            found = product(rows[:num_rows].to(device)).float().cpu()
            error = float((found - wanted[:num_rows]).abs().max() / wanted.abs().max())
            if not error <= how.tolerance:
                return f"its products are off by {error:.2g} here"
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        return f"torch {torch.__version__} cannot multiply it here: {str(error).splitlines()[0]}"
    return None


def _quantize_weight(weight: torch.Tensor, how: DeviceMultiplication) -> Quantized:
    num_outputs, size = (_round_up(count, how.size_multiple) for count in weight.shape)
    numbers = torch.empty(num_outputs, size, dtype=how.bits.dtype, device=weight.device)
    scales = torch.empty(num_outputs, dtype=torch.float32, device=weight.device)
    for start in range(0, num_outputs, _ROWS_AT_ONCE):
        part = slice(start, min(start + _ROWS_AT_ONCE, num_outputs))
        rows = _padded(weight[part], part.stop - start, size)
        numbers[part], scales[part] = quantize_rows(rows, how.bits)
    return Quantized(numbers, scales)


def _padded(x: torch.Tensor, num_rows: int, size: int) -> torch.Tensor:
    """Return ``[num_rows, size]``, contiguous, zeros below and to the right of ``x``."""
    if x.shape == (num_rows, size):
        return x.contiguous()
    return functional.pad(x, (0, size - x.shape[1], 0, num_rows - x.shape[0]))


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
