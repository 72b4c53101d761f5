"""Paged attention of a whole step in one launch: prefill chunks by tiles, decodes by partitions.

A work item is a tile of a chunk's new tokens, or one partition of the keys of a decode::

    item      0     1     2     3     4     5            seq 0: a decode, 600 keys in 3 partitions
    seq       0     0     0     1     2     2            seq 1: a decode with few keys
    part      0     1     2     0     0     1            seq 2: a chunk in 2 tiles

The query heads that share a KV head are rows of one product, so keys are read once for all of them.
How a decode's keys are cut follows from its own length, so its bits do not depend on its company.

How many items there are only the device knows; a graph has to be ready for sequences of any length.
So a bounded number of programs takes them in turns: one for each that there might be would have the
few that fit on a GPU at once start and end for nothing.
"""

import triton
import triton.language as tl

from headrace_worker.kernels_triton.online_softmax import anchor_of, attend_keys


@triton.jit(do_not_specialize=["num_seqs", "table_stride", "num_parts"])
def attend_step(
    output,  # [num_tokens, heads, head_dim]
    part_sums,  # [num_seqs, heads, num_parts, head_dim] float32, what decodes leave to the merge
    part_stats,  # [2, num_seqs, heads, num_parts] float32: maximum and sum of the weights
    query,  # [num_tokens, heads, head_dim]
    key_cache,  # [num_slots, kv_heads, head_dim]
    value_cache,
    block_table,  # [num_seqs, max_blocks]
    cu_seqlens_q,  # [num_seqs + 1]
    seq_lens,  # [num_seqs]
    item_seqs,  # [most_items] the sequence of each work item
    item_parts,  # [most_items] which of its tiles or partitions
    num_items,  # [1] how many there are
    num_seqs,
    num_parts,  # partitions of the longest sequence
    table_stride,
    query_token_stride,
    query_head_stride,
    score_factor,
    cap_factor,
    S: tl.constexpr,  # AttentionShape
    HAS_CHUNKS: tl.constexpr,  # decodes alone need half the registers and shared memory
):
    """Compute every so many-th work item for one KV head."""
    key_cache += tl.program_id(1) * S.head_dim
    value_cache += tl.program_id(1) * S.head_dim
    for item in range(tl.program_id(0), tl.load(num_items), tl.num_programs(0)):
        seq = tl.load(item_seqs + item)
        part = tl.load(item_parts + item)
        first_token = tl.load(cu_seqlens_q + seq)
        num_new = tl.load(cu_seqlens_q + seq + 1) - first_token
        seq_len = tl.load(seq_lens + seq)
        table = block_table + seq.to(tl.int64) * table_stride
        heads = query + first_token.to(tl.int64) * query_token_stride
        results = output + first_token.to(tl.int64) * (S.num_heads * S.head_dim)
        if num_new == 1:
            _attend_part(
                results, part_sums, part_stats, heads, key_cache, value_cache, table, seq, seq_len,
                part, num_seqs, num_parts, query_head_stride, score_factor, cap_factor, S,
            )  # fmt: skip
        elif HAS_CHUNKS:
            _attend_tile(
                results, heads, key_cache, value_cache, table, seq_len, num_new, part,
                query_token_stride, query_head_stride, score_factor, cap_factor, S,
            )  # fmt: skip


@triton.jit
def _attend_tile(
    output,
    query,
    key_cache,
    value_cache,
    table,
    seq_len,
    num_new,
    tile,
    token_stride,
    head_stride,
    score_factor,
    cap_factor,
    S: tl.constexpr,
):
    """Attend ``tile_tokens`` new tokens of a chunk to all keys up to their own."""
    ROWS: tl.constexpr = S.chunk_rows
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, S.dims)
    token = tile * S.tile_tokens + rows // S.group
    head = tl.program_id(1) * S.group + rows % S.group
    is_row = (rows < S.tile_tokens * S.group) & (token < num_new)
    is_element = is_row[:, None] & (dims < S.head_dim)[None, :]
    place = token.to(tl.int64) * token_stride + head * head_stride
    heads = tl.load(query + place[:, None] + dims[None, :], mask=is_element, other=0.0)

    num_computed = seq_len - num_new
    begin = first_key(num_computed + tile * S.tile_tokens, S)
    end = num_computed + tl.minimum((tile + 1) * S.tile_tokens, num_new)
    values, _, total = attend_keys(
        heads.to(S.product), num_computed + token, key_cache, value_cache, table, begin, end,
        score_factor, cap_factor, ROWS, S,
    )  # fmt: skip
    place = (token.to(tl.int64) * S.num_heads + head) * S.head_dim
    values = values / tl.where(is_row, total, 1.0)[:, None]
    tl.store(output + place[:, None] + dims[None, :], values, mask=is_element)


@triton.jit
def _attend_part(
    output,
    part_sums,
    part_stats,
    query,
    key_cache,
    value_cache,
    table,
    seq,
    seq_len,
    part,
    num_seqs,
    num_parts,
    head_stride,
    score_factor,
    cap_factor,
    S: tl.constexpr,
):
    """Attend a decode to one partition of its keys; a lone partition is the result."""
    ROWS: tl.constexpr = S.decode_rows
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, S.dims)
    head = tl.program_id(1) * S.group + rows
    is_element = (rows < S.group)[:, None] & (dims < S.head_dim)[None, :]
    first = first_key(seq_len - 1, S)
    part_len, num_own_parts = partition(seq_len - first, S)
    if part < num_own_parts:
        place = head[:, None] * head_stride + dims[None, :]
        heads = tl.load(query + place, mask=is_element, other=0.0).to(S.product)
        begin = first + part * part_len
        end = tl.minimum(begin + part_len, seq_len)
        position = tl.full([ROWS], 0, tl.int32) + (seq_len - 1)
        values, highest, total = attend_keys(
            heads, position, key_cache, value_cache, table, begin, end,
            score_factor, cap_factor, ROWS, S,
        )  # fmt: skip
        if num_own_parts == 1:
            values = values / tl.where(rows < S.group, total, 1.0)[:, None]
            results = output + head[:, None] * S.head_dim + dims[None, :]
            tl.store(results, values, mask=is_element)
        else:
            slot = (seq.to(tl.int64) * S.num_heads + head) * num_parts + part
            sums = part_sums + slot[:, None] * S.head_dim + dims[None, :]
            tl.store(sums, values, mask=is_element)
            tl.store(part_stats + slot, highest, mask=rows < S.group)
            behind = num_seqs.to(tl.int64) * S.num_heads * num_parts
            tl.store(part_stats + behind + slot, total, mask=rows < S.group)


@triton.jit(do_not_specialize=["num_seqs", "num_parts"])
def merge_parts(
    output,  # [num_tokens, heads, head_dim]
    part_sums,  # as in attend_step
    part_stats,
    cu_seqlens_q,  # [num_seqs + 1]
    seq_lens,  # [num_seqs]
    num_seqs,
    num_parts,
    S: tl.constexpr,  # AttentionShape
):
    """Merge the partitions of one decode and head, in their order (Dao et al., 2023)."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(cu_seqlens_q + seq)
    seq_len = tl.load(seq_lens + seq)
    first = first_key(seq_len - 1, S)
    _, num_own_parts = partition(seq_len - first, S)
    if (tl.load(cu_seqlens_q + seq + 1) - token == 1) & (num_own_parts > 1):
        parts = tl.arange(0, S.max_parts)
        dims = tl.arange(0, S.dims)
        is_part = parts < num_own_parts
        slot = (seq.to(tl.int64) * S.num_heads + head) * num_parts + parts
        highest = tl.load(part_stats + slot, mask=is_part, other=float("-inf"))
        weight = tl.exp2(highest - anchor_of(tl.max(highest, 0)))
        behind = num_seqs.to(tl.int64) * S.num_heads * num_parts
        total = tl.load(part_stats + slot + behind, mask=is_part, other=0.0)
        is_element = is_part[:, None] & (dims < S.head_dim)[None, :]
        place = slot[:, None] * S.head_dim + dims[None, :]
        sums = tl.load(part_sums + place, mask=is_element, other=0.0)
        values = tl.sum(sums * weight[:, None], 0) / tl.sum(total * weight, 0)
        place = (token.to(tl.int64) * S.num_heads + head) * S.head_dim + dims
        tl.store(output + place, values, mask=dims < S.head_dim)


@triton.jit
def partition(span, S: tl.constexpr):
    """Return how long a partition of ``span`` keys is, and how many there are."""
    length = S.part_keys * tl.cdiv(span, S.part_keys * S.max_parts)
    return length, tl.cdiv(span, length)


@triton.jit
def first_key(position, S: tl.constexpr):
    """Return where the keys that ``position`` sees begin, rounded down to a whole tile."""
    first = position * 0
    if S.window is not None:
        first = tl.maximum(position + 1 - S.window, 0) // S.tile_keys * S.tile_keys
    return first
