"""Row counts at which a packed product gives a row the bits that it has in any other batch.

oneDNN chooses a kernel by the number of rows, and kernels round differently: on processors with
AMX, up to 32 bfloat16 rows often come out of another kernel than 64. So each count is tried against
a tile of 64 rows when it first occurs, and one that differs is padded or cut to counts that do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

TILE_ROWS = 64  # the yardstick: a row of a full tile has the same bits at every place in it
_PADDING_STEP = 8  # rows
_NUM_PROBED_ROWS = 32  # of each count, at least


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that are multiplied in one call."""

    num_rows: int
    num_padded_rows: int  # as many as the call is given, at least num_rows


class RowCounts:
    """The row counts of one shape of product: all layers with equal shapes share what is found."""

    def __init__(
        self, multiply: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor
    ) -> None:
        self._multiply = multiply  # [num_rows, in_features] → [num_rows, out_features]
        self._probe = probe_rows(weight)  # [64, in_features]
        self._places = torch.arange(TILE_ROWS) % weight.shape[0]  # [64], output each row watches
        self._parts: dict[tuple[int, int], tuple[Part, ...]] = {}  # by rows and threads
        self._is_alike: dict[tuple[int, int], bool] = {}  # by the same: has the bits of a tile
        self._tiles: dict[int, torch.Tensor] = {}  # by threads: what each row watches, [64]

    def parts(self, num_rows: int) -> tuple[Part, ...]:
        """Return how to multiply so many rows; one part without padding wherever that is exact."""
        key = (num_rows, torch.get_num_threads())
        if (known := self._parts.get(key)) is None:
            known = self._parts[key] = self._find(num_rows)
        return known

    def _find(self, num_rows: int) -> tuple[Part, ...]:
        if self._matches_tile(num_rows):
            return (Part(num_rows, num_rows),)
        if num_rows <= TILE_ROWS:
            return (Part(num_rows, self._pad(num_rows)),)
        half = -(-num_rows // (2 * TILE_ROWS)) * TILE_ROWS
        return (*self.parts(half), *self.parts(num_rows - half))

    def _pad(self, num_rows: int) -> int:
        first = -(-(num_rows + 1) // _PADDING_STEP) * _PADDING_STEP
        candidates = range(first, TILE_ROWS, _PADDING_STEP)
        return next(filter(self._matches_tile, candidates), TILE_ROWS)

    def _matches_tile(self, num_rows: int) -> bool:
        if num_rows in (0, TILE_ROWS):
            return True
        key = (num_rows, torch.get_num_threads())
        if (known := self._is_alike.get(key)) is None:
            known = self._is_alike[key] = self._try(num_rows)
        return known

    def _try(self, num_rows: int) -> bool:
        tile = self._tile()
        for start in range(0, _NUM_PROBED_ROWS, num_rows):
            rows = torch.arange(start, start + num_rows) % TILE_ROWS
            if not torch.equal(self._watched(rows), tile[rows]):
                return False
        return True

    def _tile(self) -> torch.Tensor:
        """Return what a full tile gives; a product as large as a head's is computed once."""
        num_threads = torch.get_num_threads()
        if (known := self._tiles.get(num_threads)) is None:
            known = self._tiles[num_threads] = self._watched(torch.arange(TILE_ROWS))
        return known

    def _watched(self, rows: torch.Tensor) -> torch.Tensor:
        """Return for each of these probe rows the one output that it is made for."""
        product = self._multiply(self._probe[rows])
        return product.gather(1, self._places[rows, None])[:, 0]


def probe_rows(weight: torch.Tensor) -> torch.Tensor:
    """Return 64 rows for ``weight [out, in]``; row r is orthogonal to row r of the weight.

    Each pair (i, j) of inputs gets (w_j, -w_i), whose products cancel exactly. What is left of the
    output is rounding alone, so that a kernel that adds in another order is seen at once; ordinary
    rows show it in one output of thousands.
    """
    out_features, in_features = weight.shape
    watched = weight[torch.arange(TILE_ROWS) % out_features]  # [64, in_features]
    order = torch.randperm(in_features, generator=torch.Generator().manual_seed(0))
    first, second = order[: in_features // 2], order[in_features // 2 :][: in_features // 2]
    rows = torch.zeros_like(watched)
    rows[:, first], rows[:, second] = watched[:, second], -watched[:, first]
    return rows


def multiply_padded(
    multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """Return ``multiply(x)``, computed with rows of zeros up to ``num_rows``."""
    num_missing = num_rows - x.shape[0]
    if num_missing == 0:
        return multiply(x)
    return multiply(torch.nn.functional.pad(x, (0, 0, 0, num_missing)))[: x.shape[0]]
