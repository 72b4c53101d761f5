"""Our packed product in the place of torch's, so that a row does not depend on its neighbours.

A CPU product rounds by how many rows it has. Every matrix of a model is replaced where it is used
as one: linear layers, GPT-2's transposed ones, the experts of a mixture and the routers that choose
them. Experts of an unusual form (transposed, biased, interleaved) stay as transformers has them.
So do functions that a model calls by themselves; activations that are modules are ours, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from headrace_worker.model.activations import ACTIVATIONS, Activation
from headrace_worker.model.linear import Linear, ProductShape, can_pack
from headrace_worker.model.row_counts import RowCounts

_SILUS = (nn.SiLU, type(ACT2FN["silu"]))
_TANH_GELU = type(ACT2FN["gelu_pytorch_tanh"])


class PackedLinear(nn.Module):
    """A linear layer over any leading dimensions."""

    def __init__(self, linear: Linear, weight: torch.Tensor) -> None:
        super().__init__()
        self._linear = linear
        self._out_features = weight.shape[0]
        self.weight = weight.new_empty(0)  # some modules ask it for dtype and device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out_features]`` of ``[..., in_features]``."""
        product = self._linear(x.reshape(-1, x.shape[-1]))
        return product.view(*x.shape[:-1], self._out_features)


class RowActivation(nn.Module):
    """An activation that a model keeps as a module."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activation of ``[..., width]``."""
        return self._activation(x)


class PackedExperts(nn.Module):
    """The experts of a mixture, each computed for the rows that chose it, always in one order."""

    def __init__(
        self,
        gate_up: list[Linear],
        down: list[Linear],
        apply_gate: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        self._gate_up = gate_up
        self._down = down
        self._apply_gate = apply_gate  # [num_rows, 2 * width] → [num_rows, width]

    def forward(
        self,
        hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
        top_k_index: torch.Tensor,  # [num_tokens, k], experts chosen
        top_k_weights: torch.Tensor,  # [num_tokens, k]
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, ``[num_tokens, hidden_size]``."""
        output = torch.zeros_like(hidden_states)
        for expert in sorted(set(top_k_index.flatten().tolist())):
            row, choice = torch.where(top_k_index == expert)
            inner = self._apply_gate(self._gate_up[expert](hidden_states[row]))
            weighted = self._down[expert](inner) * top_k_weights[row, choice, None]
            output.index_add_(0, row, weighted.to(output.dtype))
        return output


class PackedMatrix(torch.Tensor):
    """A matrix whose module multiplies by itself, through ``functional.linear``: a router's."""

    linear: Linear

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take the packed product where there is one to take; all else is as for any tensor."""
        if func is functional.linear and len(args) == 2 and isinstance(args[1], cls):
            x, matrix = args
            return matrix.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], matrix.shape[0])
        default: Any = super().__torch_function__  # torch leaves it untyped
        return default(func, types, args, kwargs or {})


def pack_model(model: nn.Module) -> None:
    """Replace every product of a model on the CPU; elsewhere, torch's own are left.

    One matrix is in memory twice at a time: a module is let go before the next is packed.
    """
    packer = _Packer()
    places = [(parent, name) for parent in model.modules() for name, _ in parent.named_children()]
    for parent, name in places:
        if (replacement := packer.replace(getattr(parent, name))) is not None:
            setattr(parent, name, replacement)
    for module in model.modules():
        packer.replace_own_matrix(module)


def widest_product(model: nn.Module, experts_per_token: int) -> int:
    """Return the most elements that a token's feed-forward layer holds; before packing."""
    widths = [module.out_features for module in model.modules() if type(module) is nn.Linear]
    widths += [module.nf for module in model.modules() if isinstance(module, Conv1D)]
    for module in model.modules():
        stacked = getattr(module, "gate_up_proj", None)
        if isinstance(stacked, nn.Parameter) and stacked.ndim == 3:
            widths.append(experts_per_token * max(stacked.shape[1:]))
    return max(widths, default=0)


class _Packer:
    """Packs one model's matrices; those of one shape share what is found out about it."""

    def __init__(self) -> None:
        self._known: dict[ProductShape, RowCounts] = {}

    def replace(self, module: nn.Module) -> nn.Module | None:
        """Return what computes the same as ``module`` from packed weights, if anything does."""
        if type(module) is nn.Linear:
            return self._pack_linear(module.weight.detach(), module.bias)
        if type(module) is Conv1D:
            return self._pack_linear(module.weight.detach().t().contiguous(), module.bias)
        if _is_plain_mixture(module):
            return self._pack_experts(module)
        name = _activation_name(module)
        return None if name is None else RowActivation(ACTIVATIONS[name])

    def replace_own_matrix(self, module: nn.Module) -> None:
        """Pack a matrix that its module multiplies by itself: embeddings look theirs up.

        It is small, so it is kept beside its packed form for whatever else its module does.
        """
        weight = module._parameters.get("weight")
        has_none = weight is None or weight.ndim != 2
        if has_none or isinstance(module, nn.Linear | nn.Embedding | Conv1D):
            return
        assert weight is not None
        linear = self._pack(weight.detach())
        if linear is not None:
            matrix = weight.detach().as_subclass(PackedMatrix)
            matrix.linear = linear
            del module.weight
            module.weight = matrix

    def _pack_linear(self, weight: torch.Tensor, bias: nn.Parameter | None) -> PackedLinear | None:
        linear = self._pack(weight, None if bias is None else bias.detach())
        return None if linear is None else PackedLinear(linear, weight)

    def _pack_experts(self, module: Any) -> PackedExperts | None:
        stacks = (module.gate_up_proj.detach(), module.down_proj.detach())
        packed = [[self._pack(matrix) for matrix in stack] for stack in stacks]
        gate_up, down = ([linear for linear in stack if linear is not None] for stack in packed)
        if len(gate_up) + len(down) < 2 * len(stacks[0]):
            return None
        del module.gate_up_proj, module.down_proj  # the gate's method keeps the module
        return PackedExperts(gate_up, down, module._apply_gate)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear | None:
        if weight.device.type != "cpu" or not can_pack(weight.dtype):
            return None
        linear = Linear(weight, bias)
        linear.pack(known=self._known)
        return linear


def _activation_name(module: nn.Module) -> str | None:
    """Return our name of a module's activation, if we have it."""
    if type(module) in _SILUS:
        return "silu"
    # The class has a second form, which is written out in Python and depends on no place.
    is_tanh_gelu = type(module) is _TANH_GELU and isinstance(module.act, partial)
    return "gelu_pytorch_tanh" if is_tanh_gelu else None


def _is_plain_mixture(module: nn.Module) -> bool:
    """Whether these are gated experts, stored as transformers stores them by default."""
    stacked = (getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None))
    if not all(isinstance(matrix, nn.Parameter) and matrix.ndim == 3 for matrix in stacked):
        return False
    wanted = {
        "has_gate": True,
        "is_concatenated": True,
        "is_transposed": False,
        "has_bias": False,
        "has_post_expert_norm": False,
    }
    return all(getattr(module, name, value) is value for name, value in wanted.items())
