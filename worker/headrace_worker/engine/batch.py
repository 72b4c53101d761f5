"""From a schedule to the packed batch: plain tensors, no padding, no Python step per token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as ReadOnlyList
from itertools import accumulate, chain

import torch

from headrace_worker.attention.base import PackedBatch
from headrace_worker.engine.block_pool import TRASH_BLOCK
from headrace_worker.engine.schedule import ScheduledSequence
from headrace_worker.engine.transfer import to_device

PENDING_ID = 0
"""Stands for a token that only the device knows, until it is put in there."""


def build_batch(
    scheduled: ReadOnlyList[ScheduledSequence], block_size: int, device: torch.device
) -> PackedBatch:
    """Lay the shares of one step end to end, in the given order: decodes first, then chunks."""
    num_new = [share.num_new_tokens for share in scheduled]
    starts = [share.seq.num_computed_tokens for share in scheduled]
    ends = [start + count for start, count in zip(starts, num_new, strict=True)]
    cu_seqlens = [0, *accumulate(num_new)]
    positions = list(chain.from_iterable(map(range, starts, ends)))  # [num_tokens]
    block_table = _pad([share.seq.block_table for share in scheduled])  # [num_seqs, max_blocks]
    return PackedBatch(
        input_ids=to_device(_int64(_new_token_ids(scheduled, ends)), device),
        positions=to_device(places := _int64(positions), device),
        slot_mapping=to_device(_slots(places, num_new, block_table, block_size), device),
        cu_seqlens_q=to_device(torch.tensor(cu_seqlens, dtype=torch.int32), device),
        seq_lens=to_device(torch.tensor(ends, dtype=torch.int32), device),
        block_table=to_device(block_table, device),
        logit_rows=to_device(_int64(_last_rows(scheduled, cu_seqlens)), device),
        max_seqlen_q=max(num_new),
        max_seqlen_k=max(ends),
        num_decodes=_count_decodes(num_new),
    )


def _new_token_ids(scheduled: ReadOnlyList[ScheduledSequence], ends: list[int]) -> list[int]:
    token_ids: list[int] = []
    for share, end in zip(scheduled, ends, strict=True):
        token_ids += share.seq.token_ids[share.seq.num_computed_tokens : end]
        if share.seq.num_pending_tokens:
            token_ids.append(PENDING_ID)
    return token_ids


def _int64(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _pad(rows: list[list[int]]) -> torch.Tensor:
    """Pad rows to one width; an array takes them several times as fast as a tensor from lists."""
    width = max(map(len, rows))
    padded = array("i")  # int32
    for row in rows:
        padded.fromlist(row)
        padded.fromlist([TRASH_BLOCK] * (width - len(row)))
    return torch.frombuffer(padded, dtype=torch.int32).view(len(rows), width)


def _slots(
    positions: torch.Tensor, num_new: list[int], block_table: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Find each token's place in the cache through its sequence's row of the block table."""
    rows = torch.repeat_interleave(torch.tensor(num_new))  # [num_tokens], which sequence
    blocks = block_table[rows, positions // block_size].to(torch.int64)
    return blocks * block_size + positions % block_size


def _last_rows(scheduled: ReadOnlyList[ScheduledSequence], cu_seqlens: list[int]) -> list[int]:
    """A chunk that does not reach the end of its sequence has no row: it is never sampled."""
    return [end - 1 for share, end in zip(scheduled, cu_seqlens[1:], strict=True) if share.samples]


def _count_decodes(num_new: list[int]) -> int:
    return next((index for index, count in enumerate(num_new) if count > 1), len(num_new))
