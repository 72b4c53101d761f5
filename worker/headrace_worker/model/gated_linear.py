"""The first half of a feed-forward layer: gates and factors in one projection, multiplied."""

from __future__ import annotations

import torch

from headrace_worker.model.eight_bits import quantize_rows
from headrace_worker.model.int8 import int8_product
from headrace_worker.model.linear import Linear, ProductShape, Quantize, has_matrix_unit
from headrace_worker.model.row_counts import RowCounts
from headrace_worker.model.row_ops import RowOps

_GATES_IN_TURN = 16  # then as many factors; what one register of the matrix unit holds
_IS_GELU = {"silu": False, "gelu_pytorch_tanh": True}


class GatedLinear(Linear):
    """``activation(gate) * factor`` of rows ``[gate | factor]``, ``[num_tokens, in_features]``.

    On the CPU's matrix unit the product is taken before the sums leave the cache: half as much is
    written, and nothing read again. The bits are those of the two steps, but for results too small
    to be normal numbers, which become zeros.
    """

    __slots__ = ("_activation",)

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, activation: str
    ) -> None:
        super().__init__(weight, bias)
        self._activation = activation

    def gated(self, x: torch.Tensor, row_ops: RowOps) -> torch.Tensor:
        """Return ``[num_tokens, out_features / 2]``."""
        rows = self(x)
        if isinstance(self._product, GatedProduct | Int8GatedProduct):
            return rows
        return row_ops.gate(rows, self._activation)

    def pack(
        self, *, keep_weight: bool = False, known: dict[ProductShape, RowCounts] | None = None
    ) -> None:
        """Pack as any projection, or for both steps in one where that can be."""
        if not self._can_fuse():
            super().pack(keep_weight=keep_weight, known=known)
            return
        self._product = GatedProduct(self.weight, self.bias, is_gelu=_IS_GELU[self._activation])
        if not keep_weight:
            del self.weight

    def quantize(self, quantize: Quantize) -> None:
        """Turn the weight into fewer bits as any, or for both steps in one where that can be."""
        if quantize is not int8_product or not self._can_fuse():
            super().quantize(quantize)
            return
        is_gelu = _IS_GELU[self._activation]
        self._product = Int8GatedProduct(self.weight, self.bias, is_gelu=is_gelu)
        del self.weight

    def _can_fuse(self) -> bool:
        return (
            self.weight.device.type == "cpu"
            and self._activation in _IS_GELU
            and len(self.weight) % (2 * _GATES_IN_TURN) == 0
            and has_matrix_unit(self.weight.dtype)
        )


class GatedProduct:
    """Both steps in one, of a bfloat16 weight on AMX."""

    __slots__ = ("_bias", "_is_gelu", "_packed", "nbytes")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_gelu: bool) -> None:
        self._packed = torch.ops.headrace.pack_linear(_take_turns(weight))
        self._bias = None if bias is None else _take_turns(bias)
        self._is_gelu = is_gelu
        self.nbytes = self._packed.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[num_tokens, out_features / 2]``."""
        gated: torch.Tensor = torch.ops.headrace.packed_gated_linear(
            x, self._packed, self._bias, self._is_gelu
        )
        return gated


class Int8GatedProduct:
    """Both steps in one, in eight bits on AMX; see Int8MatrixProduct."""

    __slots__ = ("_bias", "_is_gelu", "_packed", "_scales", "nbytes")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_gelu: bool) -> None:
        numbers, self._scales = quantize_rows(_take_turns(weight))
        self._packed = torch.ops.headrace.pack_linear(numbers)
        self._bias = None if bias is None else _take_turns(bias)
        self._is_gelu = is_gelu
        self.nbytes = self._packed.nbytes + self._scales.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[num_tokens, out_features / 2]`` of bfloat16 rows."""
        numbers, scales = torch.ops.headrace.quantize_rows(x)
        gated: torch.Tensor = torch.ops.headrace.packed_gated_linear_int8(
            numbers, scales, self._packed, self._scales, self._bias, self._is_gelu
        )
        return gated


def _take_turns(stacked: torch.Tensor) -> torch.Tensor:
    """Return ``[gates, then factors, ...]`` with 16 of one and 16 of the other in turn."""
    both = stacked.view(2, -1, _GATES_IN_TURN, *stacked.shape[1:])
    return both.transpose(0, 1).reshape(stacked.shape)
