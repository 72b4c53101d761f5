"""The scheduler: one rule, no phases.

Every sequence has tokens and computed tokens; a step runs the difference for as many sequences as
the token budget and the KV blocks allow. A difference of one is a decode, a larger one a prefill,
cut into chunks by the budget: iteration-level scheduling (Orca, OSDI 2022) with a stall-free budget
(Sarathi-Serve, OSDI 2024).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from headrace_worker.engine.admission import Admission
from headrace_worker.engine.block_pool import BlockPool, block_digest, root_digest
from headrace_worker.engine.sequence import Sequence, SequenceStatus

# Blocks of a prefix that must be computed in a step for a newcomer to wait for them until the next.
_WORTH_WAITING = 2


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence's share of one step: that many tokens from ``num_computed_tokens`` on."""

    seq: Sequence
    num_new_tokens: int

    @property
    def samples(self) -> bool:
        """Whether this step reaches the last known token; an earlier chunk is never sampled."""
        is_last = self.num_new_tokens == self.seq.num_uncomputed_tokens
        return is_last and self.seq.ended is None

    @property
    def scored(self) -> range:
        """Places in the prompt whose scores are owed and that this step has the logits for.

        Those of a token score the next one. A preempted sequence owes nothing it told before.
        """
        seq = self.seq
        reached = seq.num_computed_tokens + self.num_new_tokens + 1
        return range(seq.num_scored_tokens, min(reached, seq.num_prompt_tokens))


@dataclass(slots=True)
class Schedule:
    """What one step will run."""

    budget_left: int  # tokens
    scheduled: dict[int, ScheduledSequence] = field(default_factory=dict)  # by seq_id
    fills: dict[int, list[bytes]] = field(default_factory=dict)  # digests, of prefills by seq_id
    admitted: list[Sequence] = field(default_factory=list)  # for the first time
    preempted: list[Sequence] = field(default_factory=list)

    def include(self, seq: Sequence, num_new_tokens: int) -> None:
        """Give a sequence its share of the budget."""
        self.scheduled[seq.seq_id] = ScheduledSequence(seq, num_new_tokens)
        self.budget_left -= num_new_tokens

    def exclude(self, seq: Sequence) -> None:
        """Take a share back, if there was one."""
        share = self.scheduled.pop(seq.seq_id, None)
        self.budget_left += share.num_new_tokens if share else 0
        self.fills.pop(seq.seq_id, None)

    @property
    def filled(self) -> set[bytes]:
        """Digests of the blocks that its prefills fill."""
        return set(chain.from_iterable(self.fills.values()))


class Scheduler:
    """Decides each step; plain ints and lists, so it runs without torch."""

    def __init__(
        self,
        pool: BlockPool,
        admission: Admission,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.pool = pool
        self.admission = admission
        self.waiting: list[Sequence] = []  # by rank: a preempted one stands before later arrivals
        self.running: list[Sequence] = []  # in order of admission
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that ``admission`` did not refuse."""
        insort(self.waiting, seq, key=_rank)

    def reprioritise(self, seq: Sequence, priority: int) -> None:
        """Change a sequence's rank, wherever it stands."""
        is_waiting = seq in self.waiting
        if is_waiting:
            self.waiting.remove(seq)
        seq.priority = priority
        if is_waiting:
            self.add(seq)

    def schedule(self) -> Schedule:
        """Choose the next step: running decodes, then running prefills, then waiting sequences.

        A waiting sequence of sooner priority goes before prefills, though: they take what it
        leaves, so a long prompt of later priority does not hold it up.
        """
        step = Schedule(self._max_num_batched_tokens)
        for seq in sorted(self.running, key=_turn):
            if seq.status is SequenceStatus.RUNNING:  # not preempted by one before it
                self._schedule_running(seq, step)
        if not step.preempted:
            put_off = self._put_off_prefills(step)
            self._admit_waiting(step)
            for seq in put_off:
                if seq.status is SequenceStatus.RUNNING:
                    self._schedule_running(seq, step)
        return step

    def commit(self, scheduled: Iterable[ScheduledSequence]) -> None:
        """Record that these shares were computed, and let others reuse the blocks they filled."""
        for share in scheduled:
            share.seq.num_computed_tokens += share.num_new_tokens
            self._register_full_blocks(share.seq)

    def remove(self, seq: Sequence, *, is_poisoned: bool = False) -> None:
        """End a sequence in any state and free its blocks; poisoned ones are never reused."""
        where = self.running if seq.status is SequenceStatus.RUNNING else self.waiting
        where.remove(seq)
        if is_poisoned:
            self.pool.forget(seq.block_table)
        self.pool.release(seq.finish())

    def withdraw(self, seq: Sequence) -> None:
        """Take a running sequence out and free its blocks; ``add`` lets it come again."""
        self.running.remove(seq)
        self.pool.release(seq.preempt())

    def _schedule_running(self, seq: Sequence, step: Schedule) -> None:
        num_new_tokens = min(seq.num_uncomputed_tokens, step.budget_left)
        if num_new_tokens == 0:
            return
        while not self._extend_block_table(seq, num_new_tokens):
            victim = max(self.running, key=_rank)
            self._preempt(victim, step)
            if victim is seq:
                return
        step.include(seq, num_new_tokens)
        if num_new_tokens > 1 and self.pool.enable_prefix_caching:
            num_full = (seq.num_computed_tokens + num_new_tokens) // self.pool.block_size
            step.fills[seq.seq_id] = self._digests(seq, num_full)[seq.num_registered_blocks :]

    def _admit_waiting(self, step: Schedule) -> None:
        held = 0  # leading sequences that wait for a prefix: they are passed, their room is kept
        while held < len(self.waiting) and step.budget_left:
            seq, ahead = self.waiting[held], [*self.running, *self.waiting[:held]]
            cached_blocks = self._find_cached_blocks(seq)
            victims = self.admission.displaced(seq, cached_blocks, ahead, self._max_num_seqs)
            if victims is None:
                return  # in order: skipping the head would starve long prompts
            for victim in victims:
                self._displace(victim, step)
            if self._prefix_is_filled(seq, len(cached_blocks), step):
                held += 1
                continue
            del self.waiting[held]
            if not seq.was_admitted:
                step.admitted.append(seq)
            self.pool.acquire(cached_blocks)
            seq.start(cached_blocks, len(cached_blocks) * self.pool.block_size)
            self.running.append(seq)
            self._schedule_running(seq, step)

    def _put_off_prefills(self, step: Schedule) -> list[Sequence]:
        """Take back the shares of prefills that the first one waiting goes before."""
        if not self.waiting:
            return []
        first, shares = self.waiting[0], list(step.scheduled.values())
        prefills = [share.seq for share in shares if share.num_new_tokens > 1]
        put_off = [seq for seq in prefills if first.may_displace(seq)]
        for seq in put_off:
            step.exclude(seq)
        return put_off

    def _prefix_is_filled(self, seq: Sequence, num_cached_blocks: int, step: Schedule) -> bool:
        """Whether this very step computes what it would compute again, as for n > 1 answers."""
        end = num_cached_blocks + _WORTH_WAITING
        if seq.num_reusable_tokens < end * self.pool.block_size:
            return False
        return step.filled.issuperset(self._digests(seq, end)[num_cached_blocks:])

    def _extend_block_table(self, seq: Sequence, num_new_tokens: int) -> bool:
        num_slots = seq.num_computed_tokens + num_new_tokens
        blocks = self.pool.allocate(max(0, self.pool.blocks_for(num_slots) - len(seq.block_table)))
        if blocks is None:
            return False
        seq.block_table += blocks
        return True

    def _preempt(self, seq: Sequence, step: Schedule) -> None:
        """Send a running sequence back to waiting, because blocks ran out."""
        self._send_back(seq, seq.preempt(), step)

    def _displace(self, seq: Sequence, step: Schedule) -> None:
        """Send a running sequence back to waiting, for one of sooner priority."""
        self._send_back(seq, seq.give_way(), step)

    def _send_back(self, seq: Sequence, blocks: list[int], step: Schedule) -> None:
        step.exclude(seq)
        step.preempted.append(seq)
        self.running.remove(seq)
        self.pool.release(blocks)
        self.add(seq)

    def _find_cached_blocks(self, seq: Sequence) -> list[int]:
        if not self.pool.enable_prefix_caching:
            return []
        num_blocks = seq.num_reusable_tokens // self.pool.block_size
        return self.pool.find_prefix(self._digests(seq, num_blocks))

    def _register_full_blocks(self, seq: Sequence) -> None:
        if not self.pool.enable_prefix_caching:
            return
        num_full = seq.num_computed_tokens // self.pool.block_size
        if num_full > seq.num_registered_blocks:
            digests = self._digests(seq, num_full)
            for index in range(seq.num_registered_blocks, num_full):
                self.pool.register(seq.block_table[index], digests[index])
            seq.num_registered_blocks = num_full

    def _digests(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        digests, size = seq.block_digests, self.pool.block_size
        for index in range(len(digests), num_blocks):
            parent = digests[-1] if digests else root_digest(seq.salt)
            tokens = seq.token_ids[index * size : (index + 1) * size]
            digests.append(block_digest(parent, tokens))
        return digests[:num_blocks]


def _turn(seq: Sequence) -> tuple[int, ...]:
    """Decodes come first, as they were admitted, then prefills by rank."""
    return (0,) if seq.num_uncomputed_tokens == 1 else (1, *seq.rank)


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank
