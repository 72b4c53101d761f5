"""The packed batch lays sequences end to end and finds every token's place in the cache."""

from __future__ import annotations

import torch

from headrace_worker.attention.base import PackedBatch
from headrace_worker.engine.batch import build_batch
from headrace_worker.engine.scheduler import ScheduledSequence
from headrace_worker.engine.sequence import Sequence
from support.oracle import request


def share(
    token_ids: list[int], *, num_computed: int, num_new: int, block_table: list[int]
) -> ScheduledSequence:
    """Build a share of a step over blocks of four tokens."""
    seq = Sequence(request(1, token_ids), arrival=1)
    seq.start([], 0)
    seq.block_table, seq.num_computed_tokens = block_table, num_computed
    return ScheduledSequence(seq, num_new)


def example() -> PackedBatch:
    """A decode, the middle of a prompt, and the end of a prompt."""
    shares = [
        share([10, 11, 12, 13, 14, 15], num_computed=5, num_new=1, block_table=[3, 7]),
        share(list(range(20, 30)), num_computed=3, num_new=4, block_table=[5, 2]),
        share([40, 41, 42], num_computed=1, num_new=2, block_table=[9]),
    ]
    return build_batch(shares, 4, torch.device("cpu"))


def test_new_tokens_are_laid_end_to_end_with_their_positions() -> None:
    """There is no padding: seven new tokens make seven rows."""
    batch = example()
    assert batch.input_ids.tolist() == [15, 23, 24, 25, 26, 41, 42]
    assert batch.positions.tolist() == [5, 3, 4, 5, 6, 1, 2]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 5, 7]
    assert (batch.num_tokens, batch.num_seqs) == (7, 3)


def test_a_slot_is_the_block_times_its_size_plus_the_offset() -> None:
    """Each token's place follows from its sequence's block table."""
    assert example().slot_mapping.tolist() == [29, 23, 8, 9, 10, 37, 38]


def test_lengths_and_tables_cover_what_is_in_the_cache_after_the_step() -> None:
    """seq_lens counts computed and new tokens; short rows of the table end in the trash block."""
    batch = example()
    assert batch.seq_lens.tolist() == [6, 7, 3]
    assert batch.block_table.tolist() == [[3, 7], [5, 2], [9, 0]]
    assert (batch.max_seqlen_q, batch.max_seqlen_k, batch.num_decodes) == (4, 7, 1)


def test_a_chunk_that_is_not_the_last_has_no_logit_row() -> None:
    """The middle of a prompt is computed but never sampled (B52)."""
    assert example().logit_rows.tolist() == [0, 6]


def test_a_batch_of_decodes_has_one_row_a_sequence() -> None:
    """Decodes alone: as many rows as sequences, all of them sampled."""
    shares = [share([1, 2], num_computed=1, num_new=1, block_table=[b]) for b in (1, 2, 3)]
    batch = build_batch(shares, 4, torch.device("cpu"))
    assert batch.num_decodes == batch.num_seqs == batch.num_tokens == 3
    assert batch.logit_rows.tolist() == [0, 1, 2]


def test_the_dtypes_are_those_of_the_contract() -> None:
    """Indices that torch gathers with are int64, what kernels read is int32."""
    batch = example()
    wide = (batch.input_ids, batch.positions, batch.slot_mapping, batch.logit_rows)
    narrow = (batch.cu_seqlens_q, batch.seq_lens, batch.block_table)
    assert {tensor.dtype for tensor in wide} == {torch.int64}
    assert {tensor.dtype for tensor in narrow} == {torch.int32}
