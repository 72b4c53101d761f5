"""Rows in eight bits: numbers of one format, and one scale a row that gives the values back."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class EightBits:
    """A number format of eight bits."""

    dtype: torch.dtype  # int8, or float8_e4m3fn: a sign, four bits of exponent, three of fraction
    largest: float  # magnitude that the largest element of a row gets, both signs alike


INT8 = EightBits(torch.int8, 127.0)
FP8 = EightBits(torch.float8_e4m3fn, 448.0)  # beyond it, e4m3fn has nothing but NaN


@dataclass(frozen=True, slots=True)
class Quantized:
    """Rows as numbers of eight bits."""

    numbers: torch.Tensor  # [num_rows, size]
    scales: torch.Tensor  # [num_rows] float32

    def values(self) -> torch.Tensor:
        """Return what they stand for, ``[num_rows, size]`` in float32."""
        return self.numbers.float() * self.scales[:, None]


def quantize_rows(x: torch.Tensor, bits: EightBits = INT8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers like ``x [num_rows, size]`` and float32 scales, ``[num_rows]``.

    A row that is not finite gets a scale that is not a number, and so does whatever comes of it.
    A row too small for a scale in float32 is zeros.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=-1)  # [num_rows]
    inverse = bits.largest / largest  # infinite for zeros
    is_usable = torch.isfinite(largest) & torch.isfinite(inverse)
    inverse = torch.where(is_usable, inverse, 0.0)
    scaled = torch.where(is_usable[:, None], wide * inverse[:, None], 0.0)
    if not bits.dtype.is_floating_point:
        scaled.round_()
    numbers = scaled.clamp_(-bits.largest, bits.largest).to(bits.dtype)
    scales = torch.where(torch.isfinite(largest), largest / bits.largest, torch.nan)
    return numbers, scales


def scale_rows(
    product: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return ``product * scales + bias``, by row, rounded once."""
    scaled = product.float() * scales[:, None]
    return (scaled if bias is None else scaled + bias.float()).to(product.dtype)
