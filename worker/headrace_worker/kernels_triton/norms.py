"""Root-mean-square norms in one pass over the rows, with the addition that comes before them."""

import torch
import triton
import triton.language as tl


def add_norm_rows(
    hidden: torch.Tensor,  # [num_tokens, size] or, without delta, [num_tokens, heads, size]
    delta: torch.Tensor | None,  # [num_tokens, size], added to hidden in place first
    weight: torch.Tensor,  # [size]
    eps: float,
    *,
    is_centred: bool,  # whether the factor is 1 + weight
) -> torch.Tensor:
    """Return the norm in the shape of ``hidden``, rounded where ``model.norm`` rounds."""
    size = hidden.shape[-1]
    heads = hidden.shape[1] if hidden.dim() == 3 else 1
    assert hidden.stride(-1) == 1
    assert delta is None or (hidden.dim() == 2 and delta.stride(-1) == 1)
    normed = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    block = triton.next_power_of_2(size)
    if hidden.numel() > 0:
        _norm_row[hidden.shape[0] * heads,](
            normed, hidden, hidden if delta is None else delta, weight, eps,
            hidden.stride(0), hidden.stride(1) if heads > 1 else 0,
            0 if delta is None else delta.stride(0),
            HEADS=heads, SIZE=size, BLOCK=block, HAS_DELTA=delta is not None,
            IS_CENTRED=is_centred, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return normed


@triton.jit
def _norm_row(
    normed,
    hidden,
    delta,
    weight,
    eps,
    token_stride,
    head_stride,
    delta_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    IS_CENTRED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = row // HEADS
    place = tl.arange(0, BLOCK)
    is_element = place < SIZE
    source = hidden + token * token_stride + row % HEADS * head_stride + place
    values = tl.load(source, mask=is_element, other=0.0)
    kind = values.dtype
    wide = values.to(tl.float32)
    if HAS_DELTA:
        added = tl.load(delta + token * delta_stride + place, mask=is_element, other=0.0)
        rounded = (wide + added.to(tl.float32)).to(kind)
        tl.store(source, rounded, mask=is_element)
        wide = rounded.to(tl.float32)
    mean_square = tl.sum(wide * wide, 0) / SIZE
    scaled = wide * (1.0 / tl.sqrt(mean_square + eps))
    factor = tl.load(weight + place, mask=is_element, other=0.0).to(tl.float32)
    if not IS_CENTRED:
        scaled = scaled.to(kind).to(tl.float32)
    result = scaled * (factor + 1.0 if IS_CENTRED else factor)
    tl.store(normed + row * SIZE + place, result.to(kind), mask=is_element)
