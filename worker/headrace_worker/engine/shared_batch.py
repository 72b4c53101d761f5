"""A packed batch on its way to the other ranks: its sizes in an order, its numbers in one tensor.

One collective carries all of it and takes about as long as one of the two sums of a layer. A socket
would be faster on a CPU, but on a GPU some of the numbers have never been on the host.
"""

from __future__ import annotations

import torch

from headrace_worker.attention.base import PackedBatch
from headrace_worker.engine.orders import RunForward
from headrace_worker.model.ranks import Ranks


def order_of(batch: PackedBatch) -> RunForward:
    """Return what the host of another rank has to know of a batch."""
    return RunForward(
        num_tokens=batch.num_tokens,
        num_seqs=batch.num_seqs,
        table_width=int(batch.block_table.shape[1]),
        num_logit_rows=int(batch.logit_rows.shape[0]),
        max_seqlen_q=batch.max_seqlen_q,
        max_seqlen_k=batch.max_seqlen_k,
        num_decodes=batch.num_decodes,
    )


def send_batch(batch: PackedBatch, ranks: Ranks) -> None:
    """Give the tensors of a batch to the ranks that have been ordered to compute it."""
    tensors = (
        batch.input_ids,
        batch.positions,
        batch.slot_mapping,
        batch.logit_rows,
        batch.cu_seqlens_q,
        batch.seq_lens,
        batch.block_table.flatten(),
    )
    ranks.share(torch.cat([tensor.to(torch.int64) for tensor in tensors]))


def receive_batch(order: RunForward, ranks: Ranks, device: torch.device) -> PackedBatch:
    """Return the batch that the first rank sends, with the sizes that were ordered."""
    num_tokens, num_seqs = order.num_tokens, order.num_seqs
    table_size = num_seqs * order.table_width
    sizes = [num_tokens, num_tokens, num_tokens, order.num_logit_rows]
    sizes += [num_seqs + 1, num_seqs, table_size]
    numbers = torch.empty(sum(sizes), dtype=torch.int64, device=device)
    ranks.share(numbers)
    ids, positions, slots, logit_rows, cu_seqlens, seq_lens, table = torch.split(numbers, sizes)
    return PackedBatch(
        input_ids=ids,
        positions=positions,
        slot_mapping=slots,
        cu_seqlens_q=cu_seqlens.int(),
        seq_lens=seq_lens.int(),
        block_table=table.int().view(num_seqs, order.table_width),
        logit_rows=logit_rows,
        max_seqlen_q=order.max_seqlen_q,
        max_seqlen_k=order.max_seqlen_k,
        num_decodes=order.num_decodes,
    )
