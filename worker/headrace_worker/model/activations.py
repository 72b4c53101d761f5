"""The activations of feed-forward layers, by transformers' name: a row keeps its bits in company.

torch hands each thread one stretch of the elements, takes a stretch by whole vectors, and what is
left at its end one by one, with another exponential, which rounds otherwise. A row keeps its bits
if no stretch ends within it; so rows are taken in parts that the threads share evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch.nn import functional

_FEW_FOR_SILU = 32_768  # elements that torch gives to a thread at least
_FEW_FOR_GELU = 16_384  # elements up to which one thread does it; more are given to all
_WHOLE_VECTORS = 64  # elements: a width of such multiples leaves nothing over, on any processor

# (number of elements, number of threads) → stretches that torch cuts the elements into
CountStretches = Callable[[int, int], int]


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of single elements, applied to whole rows."""

    function: Callable[[torch.Tensor], torch.Tensor]
    count_stretches: CountStretches

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the function of ``[..., width]``, contiguous."""
        width = x.shape[-1]
        if x.device.type != "cpu" or x.numel() <= width:
            return self.function(x)
        rows = x.reshape(-1, width)
        if width % _WHOLE_VECTORS and rows.is_contiguous():
            # Rows without a gap are one long row to torch: what is left over would be the last's.
            rows = functional.pad(rows, (0, 1))[:, :width]
        parts = even_parts(len(rows), width, torch.get_num_threads(), self.count_stretches)
        if len(parts) == 1:
            return self.function(rows).view(x.shape)
        return torch.cat([self.function(part) for part in torch.split(rows, list(parts))]).view(
            x.shape
        )


@cache
def even_parts(
    num_rows: int, width: int, num_threads: int, count_stretches: CountStretches
) -> tuple[int, ...]:
    """Cut rows into a few parts of which every thread gets whole rows, or at least whole vectors.

    Rows so wide that torch shares out a single one are parts by themselves.
    """
    if count_stretches(width, num_threads) > 1:
        return (1,) * num_rows
    unit = width if width % _WHOLE_VECTORS else _WHOLE_VECTORS  # a stretch may end after any

    def is_even(num_rows: int) -> bool:
        num_elements = num_rows * width
        return num_elements % (unit * count_stretches(num_elements, num_threads)) == 0

    parts: list[int] = []
    while num_rows > 0:
        part = next(filter(is_even, range(num_rows, 0, -1)))
        parts.append(part)
        num_rows -= part
    return tuple(parts)


def _stretches_of_silu(num_elements: int, num_threads: int) -> int:
    return min(num_threads, max(1, -(-num_elements // _FEW_FOR_SILU)))


def _stretches_of_gelu(num_elements: int, num_threads: int) -> int:
    return 1 if num_elements <= _FEW_FOR_GELU else num_threads


ACTIVATIONS = {
    "silu": Activation(functional.silu, _stretches_of_silu),
    "gelu_pytorch_tanh": Activation(
        partial(functional.gelu, approximate="tanh"), _stretches_of_gelu
    ),
}
