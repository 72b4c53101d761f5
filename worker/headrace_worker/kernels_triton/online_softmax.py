"""Attention of a tile of query rows over paged keys, by an online softmax (Milakov, 2018)."""

import triton
import triton.language as tl


@triton.jit
def attend_keys(
    query,  # [rows, dims] in the type of products
    row_position,  # [rows] the last key that each row sees
    key_cache,  # pointer to this KV head in slot 0
    value_cache,
    table,  # pointer to the sequence's row of the block table
    begin,  # keys [begin, end) are visited; begin is a multiple of S.tile_keys
    end,
    score_factor,  # see bend_scores
    cap_factor,
    ROWS: tl.constexpr,
    S: tl.constexpr,  # AttentionShape
):
    """Return the weighted values ``[ROWS, dims]``, and maximum and sum of each row's weights.

    Keys are taken in tiles that start at multiples of their size, so a row gets the same bits
    whatever its neighbours make the loop visit before and after its own keys: there its weights
    are zero.
    """
    DIMS: tl.constexpr = S.dims
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values_sum = tl.zeros([ROWS, DIMS], tl.float32)
    for start in range(begin, end, S.tile_keys):
        position = start + tl.arange(0, S.tile_keys)
        keys, values = _load_tile(key_cache, value_cache, table, position, end, S)
        products = tl.dot(query, tl.trans(keys.to(S.product)), input_precision="ieee")
        scores = bend_scores(products, score_factor, cap_factor, S)
        age = row_position[:, None] - position[None, :]
        is_visible = (age >= 0) & (position < end)[None, :]
        if S.window is not None:
            is_visible = is_visible & (age < S.window)
        scores = tl.where(is_visible, scores, float("-inf"))
        highest, total, values_sum = _add_tile(scores, values, highest, total, values_sum, S)
    return values_sum, highest, total


@triton.jit
def anchor_of(highest):
    """Return what weights are relative to: the maximum, or zero where nothing was visible."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def bend_scores(products, score_factor, cap_factor, S: tl.constexpr):
    """Return scores in powers of two: ``factor * x``, or ``cap * tanh(factor * x)``."""
    scores = products * score_factor
    if S.is_capped:
        scores = cap_factor * (1.0 - 2.0 / (tl.exp(2.0 * scores) + 1.0))
    return scores


@triton.jit
def _load_tile(key_cache, value_cache, table, position, end, S: tl.constexpr):
    """Return keys and values ``[tile_keys, dims]``, zero from ``end`` on.

    What lies behind a sequence's end may be anything, and zero times NaN is NaN.
    """
    dims = tl.arange(0, S.dims)
    is_key = position < end
    block = tl.load(table + position // S.block_size, mask=is_key, other=0)
    slot = block.to(tl.int64) * S.block_size + position % S.block_size
    place = slot[:, None] * S.slot_stride + dims[None, :]
    is_own = is_key[:, None] & (dims < S.head_dim)[None, :]
    keys = tl.load(key_cache + place, mask=is_own, other=0.0)
    values = tl.load(value_cache + place, mask=is_own, other=0.0)
    return keys, values


@triton.jit
def _add_tile(scores, values, highest, total, values_sum, S: tl.constexpr):
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    anchor = anchor_of(new_highest)
    weights = tl.exp2(scores - anchor[:, None])
    correction = tl.exp2(highest - anchor)
    total = total * correction + tl.sum(weights, 1)
    weights = weights.to(values.dtype).to(S.product)
    values_sum = values_sum * correction[:, None]
    values_sum = tl.dot(weights, values.to(S.product), values_sum, input_precision="ieee")
    return new_highest, total, values_sum
