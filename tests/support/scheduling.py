"""A scheduler over small blocks, and steps of it without a model."""

from __future__ import annotations

from headrace_worker.engine.admission import Admission
from headrace_worker.engine.block_pool import BlockPool
from headrace_worker.engine.scheduler import Schedule, Scheduler
from headrace_worker.engine.sequence import Sequence
from headrace_worker.engine.settings import Reserve
from support.oracle import request


def make_scheduler(
    *,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    budget: int = 16,
    max_model_len: int = 128,
    reserve: Reserve = Reserve.EXPECTED,
) -> Scheduler:
    """Build a scheduler over blocks of four tokens."""
    pool = BlockPool(num_blocks, 4)
    admission = Admission(pool, max_model_len=max_model_len, reserve=reserve)
    return Scheduler(pool, admission, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)


def add(
    scheduler: Scheduler, seq_id: int, num_tokens: int, *, step: int = 0, **options: object
) -> Sequence:
    """Queue a sequence with tokens of its own that arrives after so many steps."""
    token_ids = [(seq_id * 7 + i) % 61 for i in range(num_tokens)]
    command = request(seq_id, token_ids, **options)  # type: ignore[arg-type]
    seq = Sequence(command, arrival=seq_id, arrival_step=step)
    scheduler.add(seq)
    return seq


def advance(scheduler: Scheduler) -> Schedule:
    """Do one step: whatever samples gets a token."""
    step = scheduler.schedule()
    sampling = [share.seq for share in step.scheduled.values() if share.samples]
    scheduler.commit(step.scheduled.values())
    for seq in sampling:
        seq.token_ids.append(seq.seq_id)
        if seq.finish_reason(scheduler.admission.max_model_len):
            scheduler.remove(seq)
    scheduler.pool.check_integrity()
    return step


def shares(step: Schedule) -> dict[int, int]:
    """Return how many tokens each sequence runs."""
    return {seq_id: share.num_new_tokens for seq_id, share in step.scheduled.items()}
