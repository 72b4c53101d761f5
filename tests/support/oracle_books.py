"""What holds between any two steps of an engine: limits, lists, states and blocks agree."""

from __future__ import annotations

from headrace_worker.engine.engine import Engine
from headrace_worker.engine.messages import StepOutcome
from headrace_worker.engine.sequence import Sequence, SequenceStatus
from headrace_worker.engine.settings import Reserve
from support.oracle_limits import Limits


def check_outcome(outcome: StepOutcome, limits: Limits) -> None:
    """A step keeps the limits that it was given."""
    assert outcome.num_scheduled_tokens <= limits.budget
    assert outcome.num_running <= limits.max_num_seqs
    assert outcome.num_scheduled_seqs <= limits.max_num_seqs
    assert 0 <= outcome.free_blocks <= outcome.num_blocks == limits.num_blocks
    may_give_way = limits.reserve is not Reserve.WORST or not limits.is_fast  # for memory
    assert may_give_way or not outcome.preempted


def check_books(engine: Engine) -> None:
    """Blocks, lists and states agree, and no block can be written for two."""
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    pool.check_integrity()
    running, waiting = scheduler.running, scheduler.waiting
    assert all(seq.status is SequenceStatus.RUNNING for seq in running)
    assert all(seq.status is SequenceStatus.WAITING for seq in waiting)
    assert not any(seq.block_table or seq.num_computed_tokens for seq in waiting)
    assert not any(seq.num_pending_tokens or seq.num_steps_in_flight for seq in waiting)
    assert all(seq.num_steps_in_flight for seq, _ in scheduler.lingering), "blocks are kept"
    assert waiting == sorted(waiting, key=lambda seq: seq.rank)
    held: dict[int, list[tuple[Sequence, int]]] = {}
    for seq in running:
        assert pool.blocks_for(seq.num_computed_tokens) <= len(seq.block_table)
        is_last_step_in_flight = seq.ended and seq.num_steps_in_flight
        is_computed = seq.num_computed_tokens == seq.num_tokens
        assert not is_computed or is_last_step_in_flight, "nothing is left to compute"
        assert seq.num_computed_tokens <= seq.num_tokens
        for index, block in enumerate(seq.block_table):
            held.setdefault(block, []).append((seq, index))
    lingering = {block for _, blocks in scheduler.lingering for block in blocks}
    assert len(held.keys() | lingering) == pool.num_blocks - pool.num_free, (
        "a block is held, and by nobody"
    )
    for block, holders in held.items():
        if len(holders) > 1:
            _check_shared(block, holders, pool.block_size)


def _check_shared(block: int, holders: list[tuple[Sequence, int]], block_size: int) -> None:
    """A block of several sequences is full for all of them, and holds the same for all."""
    assert len({seq.seq_id for seq, _ in holders}) == len(holders), f"block {block} twice"
    first, place = holders[0]
    end = (place + 1) * block_size
    for seq, index in holders:
        assert index == place
        assert seq.num_computed_tokens >= end, f"block {block} is shared and still written"
        assert seq.salt == first.salt
        assert seq.token_ids[:end] == first.token_ids[:end]
