"""The feed-forward's gate: an activation and a product in one pass over the rows."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # elements of a row that one program takes


def gate_rows(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up`` ``[num_tokens, size]`` of rows ``[gate | up]``.

    ``activation`` is transformers' name: ``silu`` or ``gelu_pytorch_tanh``.
    """
    assert activation in ("silu", "gelu_pytorch_tanh")
    assert gate_up.stride(-1) == 1
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    gated = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens > 0:
        _gate_row[num_tokens, triton.cdiv(size, _BLOCK)](
            gated, gate_up, gate_up.stride(0),
            SIZE=size, BLOCK=_BLOCK, IS_SILU=activation == "silu", num_warps=4,
        )  # fmt: skip
    return gated


@triton.jit
def _gate_row(
    gated, gate_up, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_SILU: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_element = place < SIZE
    source = gate_up + row * row_stride + place
    gate = tl.load(source, mask=is_element, other=0.0)
    up = tl.load(source + SIZE, mask=is_element, other=0.0)
    x = gate.to(tl.float32)
    if IS_SILU:
        active = x / (1.0 + tl.exp(-x))
    else:  # x * (1 + tanh(t)) / 2 = x / (1 + exp(-2t))
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        active = x / (1.0 + tl.exp(-2.0 * inner))
    # Rounded in between, as the two operators of the reference do.
    product = active.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(gated + row * SIZE + place, product.to(gate.dtype), mask=is_element)
