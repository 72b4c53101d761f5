"""The scheduler: one rule, no phases.

Every sequence has tokens and computed tokens; a step runs the difference for as many sequences as
the token budget and the KV blocks allow. A difference of one is a decode, a larger one a prefill,
cut into chunks by the budget: iteration-level scheduling (Orca, OSDI 2022) with a stall-free budget
(Sarathi-Serve, OSDI 2024).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from itertools import chain

from headrace_worker.engine.admission import Admission
from headrace_worker.engine.block_pool import BlockPool, block_digest, root_digest
from headrace_worker.engine.schedule import Schedule, ScheduledSequence
from headrace_worker.engine.sequence import Sequence, SequenceStatus
from headrace_worker.engine.step_limits import StepLimits

__all__ = ["Schedule", "ScheduledSequence", "Scheduler"]

# Blocks of a prefix that must be computed in a step for a newcomer to wait for them until the next.
_WORTH_WAITING = 2


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
        # Blocks of sequences that are gone, which a step in flight may still write to.
        self.lingering: list[tuple[Sequence, list[int]]] = []
        self.limits = StepLimits(max_num_seqs, max_num_batched_tokens)

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

    def schedule(self, in_flight: Schedule | None = None) -> Schedule:
        """Choose the next step: running decodes, then running prefills, then waiting sequences.

        A waiting sequence of sooner priority goes before prefills, though: they take what it
        leaves, so a long prompt of later priority does not hold it up. While a step is in flight
        nobody gives way: what would need it has no share, and the next step waits for this one.
        """
        step = Schedule(self.limits.num_tokens)
        if in_flight is not None:
            step.is_ahead = True
            step.fills_in_flight = frozenset(chain.from_iterable(in_flight.fills.values()))
        for seq in sorted(self.running, key=_turn):
            if seq.status is SequenceStatus.RUNNING:  # not preempted by one before it
                self._schedule_running(seq, step)
        if not step.preempted and not step.is_held_up:
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
            self._register_full_blocks(share.seq, share.seq.num_computed_tokens)
        if self.limits.is_reduced:
            self.limits.note_good_step()

    def take_off(self, scheduled: Iterable[ScheduledSequence]) -> None:
        """Record that these shares are being computed: from now on their step is in flight."""
        for share in scheduled:
            share.seq.num_pending_tokens += share.samples
            share.seq.num_computed_tokens += share.num_new_tokens
            share.seq.num_steps_in_flight += 1

    def land(self, computed: Iterable[tuple[Sequence, int | None]]) -> None:
        """Record that a step in flight is done, with each sequence's computed tokens after it.

        None is for a share that counts for nothing. Blocks wait here until nobody writes to them.
        """
        for seq, num_computed_tokens in computed:
            seq.num_steps_in_flight -= 1
            if num_computed_tokens is not None:
                self._register_full_blocks(seq, num_computed_tokens)
        if self.limits.is_reduced:
            self.limits.note_good_step()
        lingering, self.lingering = self.lingering, []
        for seq, blocks in lingering:
            self._give_back(seq, blocks)

    def remove(self, seq: Sequence, *, is_poisoned: bool = False) -> None:
        """End a sequence in any state and free its blocks; poisoned ones are never reused."""
        where = self.running if seq.status is SequenceStatus.RUNNING else self.waiting
        where.remove(seq)
        if is_poisoned:
            self.pool.forget(seq.block_table)
        self._give_back(seq, seq.finish())

    def withdraw(self, seq: Sequence) -> None:
        """Take a running sequence out and free its blocks; ``add`` lets it come again."""
        self.running.remove(seq)
        self.pool.release(seq.preempt())

    def shrink(self, too_large: list[ScheduledSequence]) -> list[Sequence]:
        """Make the next steps half of one that found no memory; return who has to wait again.

        Nothing may be in flight.
        """
        self.limits.halve(too_large)
        sent_back = sorted(self.running, key=_rank)[self.limits.num_seqs :]
        for seq in sent_back:
            self.running.remove(seq)
            self.pool.release(seq.give_way())
            self.add(seq)
        return sent_back

    def _give_back(self, seq: Sequence, blocks: list[int]) -> None:
        if seq.num_steps_in_flight:
            self.lingering.append((seq, blocks))
        else:
            self.pool.release(blocks)

    def _schedule_running(self, seq: Sequence, step: Schedule) -> None:
        num_new_tokens = min(seq.num_uncomputed_tokens, step.budget_left)
        if num_new_tokens == 0 or self._gets_its_last_token(seq):
            return
        while not self._extend_block_table(seq, num_new_tokens):
            if step.is_ahead:
                step.is_held_up = True
                return
            victim = max(self.running, key=_rank)
            self._preempt(victim, step)
            if victim is seq:
                return
        step.include(seq, num_new_tokens)
        if num_new_tokens > 1 and self.pool.enable_prefix_caching:
            num_full = (seq.num_computed_tokens + num_new_tokens) // self.pool.block_size
            step.fills[seq.seq_id] = self._digests(seq, num_full)[seq.num_registered_blocks :]

    def _gets_its_last_token(self, seq: Sequence) -> bool:
        """Whether the step in flight samples all that it may still say."""
        if not seq.num_pending_tokens:
            return False
        return seq.remaining_output_tokens(self.admission.max_model_len) == 0

    def _admit_waiting(self, step: Schedule) -> None:
        held = 0  # leading sequences that wait for a prefix: they are passed, their room is kept
        while held < len(self.waiting) and step.budget_left and not step.is_held_up:
            seq, ahead = self.waiting[held], [*self.running, *self.waiting[:held]]
            cached_blocks = self._find_cached_blocks(seq)
            victims = self.admission.displaced(seq, cached_blocks, ahead, self.limits.num_seqs)
            if victims is None:
                return  # in order: skipping the head would starve long prompts
            if victims and step.is_ahead:
                step.is_held_up = True
                return
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

    def _register_full_blocks(self, seq: Sequence, num_computed_tokens: int) -> None:
        if not self.pool.enable_prefix_caching:
            return
        num_full = num_computed_tokens // self.pool.block_size
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
