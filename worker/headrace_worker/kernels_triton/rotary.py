"""Rotary positions in place, and the same with the write to the KV cache in one launch."""

import torch
import triton
import triton.language as tl

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and signed sin, each [num_tokens, 1, rotary_dim]


def rotate_rows(heads: torch.Tensor, rotation: Rotation) -> None:
    """Rotate ``[num_tokens, heads, head_dim]`` in place, as ``model.rope.rotate`` does.

    Dimension i pairs with i + rotary_dim / 2; dimensions from rotary_dim on stay as they are.
    """
    cos, signed_sin = rotation
    assert heads.stride(-1) == 1
    assert cos.is_contiguous()
    assert signed_sin.is_contiguous()
    if heads.numel() == 0:
        return
    half = cos.shape[-1] // 2
    _rotate_token[heads.shape[0],](
        heads, cos, signed_sin, heads.stride(0), heads.stride(1),
        HEADS=heads.shape[1], HEAD_BLOCK=triton.next_power_of_2(heads.shape[1]),
        HALF=half, HALF_BLOCK=triton.next_power_of_2(half), num_warps=4,
    )  # fmt: skip


def rotate_and_store(
    query_key: torch.Tensor,  # [num_tokens, heads + kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, kv_heads, head_dim]
    rotation: Rotation,
    cache: tuple[torch.Tensor, torch.Tensor],  # keys and values [num_slots, kv_heads, head_dim]
    slot_mapping: torch.Tensor,  # [num_tokens] int64
) -> torch.Tensor:
    """Rotate query and key in place, write key and value to their slots; return the query.

    The query ``[num_tokens, heads, head_dim]`` is a view of ``query_key``.
    """
    kv_heads, head_dim = value.shape[1:]
    num_rotated = query_key.shape[1]
    cos, signed_sin = rotation
    assert query_key.stride(-1) == value.stride(-1) == 1
    assert all(rows.is_contiguous() for rows in (*rotation, *cache))
    half = cos.shape[-1] // 2
    if query_key.numel() > 0:
        _rotate_and_store_token[query_key.shape[0],](
            query_key, value, cos, signed_sin, *cache, slot_mapping,
            query_key.stride(0), query_key.stride(1), value.stride(0), value.stride(1),
            QUERY_HEADS=num_rotated - kv_heads, KV_HEADS=kv_heads,
            HEAD_BLOCK=triton.next_power_of_2(num_rotated),
            KV_BLOCK=triton.next_power_of_2(kv_heads),
            HALF=half, HALF_BLOCK=triton.next_power_of_2(half),
            HEAD_DIM=head_dim, DIM_BLOCK=triton.next_power_of_2(head_dim), num_warps=4,
        )  # fmt: skip
    return query_key[:, : num_rotated - kv_heads]


@triton.jit
def _rotate_token(
    heads,
    cos,
    signed_sin,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEAD_BLOCK)
    dim = tl.arange(0, HALF_BLOCK)
    is_pair = (head < HEADS)[:, None] & (dim < HALF)[None, :]
    source = heads + token * token_stride + head[:, None] * head_stride + dim[None, :]
    first, second = _rotated(source, cos, signed_sin, token, dim, is_pair, HALF)
    tl.store(source, first, mask=is_pair)
    tl.store(source + HALF, second, mask=is_pair)


@triton.jit
def _rotate_and_store_token(
    query_key,
    value,
    cos,
    signed_sin,
    key_cache,
    value_cache,
    slot_mapping,
    token_stride,
    head_stride,
    value_token_stride,
    value_head_stride,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    query_key += token * token_stride
    value += token * value_token_stride
    slot = tl.load(slot_mapping + token) * (KV_HEADS * HEAD_DIM)
    head = tl.arange(0, HEAD_BLOCK)
    half = tl.arange(0, HALF_BLOCK)
    is_pair = (head < QUERY_HEADS + KV_HEADS)[:, None] & (half < HALF)[None, :]
    source = query_key + head[:, None] * head_stride + half[None, :]
    first, second = _rotated(source, cos, signed_sin, token, half, is_pair, HALF)
    tl.store(source, first, mask=is_pair)
    tl.store(source + HALF, second, mask=is_pair)
    is_key = is_pair & (head >= QUERY_HEADS)[:, None]
    stored = key_cache + slot + (head - QUERY_HEADS)[:, None] * HEAD_DIM + half[None, :]
    tl.store(stored, first, mask=is_key)
    tl.store(stored + HALF, second, mask=is_key)

    kv_head = tl.arange(0, KV_BLOCK)
    dim = tl.arange(0, DIM_BLOCK)
    is_value = (kv_head < KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    place = kv_head[:, None] * HEAD_DIM + dim[None, :]
    values = value + kv_head[:, None] * value_head_stride + dim[None, :]
    tl.store(value_cache + slot + place, tl.load(values, mask=is_value), mask=is_value)
    if 2 * HALF < HEAD_DIM:  # what does not turn
        is_still = is_value & (dim >= 2 * HALF)[None, :]
        keys = query_key + (QUERY_HEADS + kv_head)[:, None] * head_stride + dim[None, :]
        tl.store(key_cache + slot + place, tl.load(keys, mask=is_still), mask=is_still)


@triton.jit
def _rotated(source, cos, signed_sin, token, dim, is_pair, HALF: tl.constexpr):
    """Return both halves of the heads, turned; products are rounded before they are added."""
    angles = token * (2 * HALF) + dim
    c = tl.load(cos + angles, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(signed_sin + HALF + angles, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
    first = tl.load(source, mask=is_pair, other=0.0)
    second = tl.load(source + HALF, mask=is_pair, other=0.0)
    kind = first.dtype
    x, y = first.to(tl.float32), second.to(tl.float32)
    turned_first = _round(x * c, kind) - _round(y * s, kind)
    turned_second = _round(y * c, kind) + _round(x * s, kind)
    return turned_first.to(kind), turned_second.to(kind)


@triton.jit
def _round(x, kind: tl.constexpr):
    return x.to(kind).to(tl.float32)
