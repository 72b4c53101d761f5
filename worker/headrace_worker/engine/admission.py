"""Admission: who may enter, who never can, and how many blocks are really left for new work.

Out of blocks means preemption, and preempted work is computed twice, so nobody enters before the
blocks it is expected to fill are free *beyond* what the running sequences are expected to fill.
What is expected is learned from those that left: the share of max_tokens that they used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from headrace_worker.engine.block_pool import BlockPool
from headrace_worker.engine.growth import Growth
from headrace_worker.engine.messages import SequenceFailure
from headrace_worker.engine.sequence import Sequence
from headrace_worker.engine.settings import Reserve

# Growth is expected to be the learned share, in [0, 1], to one of these powers, by the number of
# preemptions: the share itself, then its geometric mean with the worst case, then the worst case.
_CAUTION = (1.0, 0.5, 0.0)


class Admission:
    """Answers for one block pool; ``max_model_len`` is cut to it, so one alone always fits."""

    def __init__(
        self, pool: BlockPool, *, max_model_len: int, reserve: Reserve = Reserve.EXPECTED
    ) -> None:
        self.max_model_len = min(max_model_len, pool.capacity_tokens)  # tokens
        self._pool = pool
        self._configured_max_model_len = max_model_len
        self._reserve = reserve
        self._growth = Growth()

    def refusal(self, seq: Sequence) -> SequenceFailure | None:
        """Return why a sequence can never run here, or None when it can."""
        if not 0 < seq.num_prompt_tokens <= seq.num_tokens:
            message = f"{seq.num_prompt_tokens} prompt tokens of {seq.num_tokens} tokens"
            return SequenceFailure(seq.seq_id, "invalid_request", message)
        needed = seq.num_prompt_tokens + 1
        if needed > self._configured_max_model_len:
            message = (
                f"a prompt of {seq.num_prompt_tokens} tokens leaves no room for output"
                f" in a context of {self._configured_max_model_len} tokens"
            )
            return SequenceFailure(seq.seq_id, "context_length_exceeded", message)
        if needed > self.max_model_len:
            message = (
                f"a prompt of {seq.num_prompt_tokens} tokens leaves no room for output"
                f" in a KV cache of {self._pool.capacity_tokens} tokens"
            )
            return SequenceFailure(seq.seq_id, "kv_capacity_exceeded", message)
        return None

    def displaced(
        self, seq: Sequence, cached_blocks: list[int], running: list[Sequence], max_num_seqs: int
    ) -> list[Sequence] | None:
        """Return who has to give way so that a waiting sequence may enter; None when it may not.

        Mostly nobody. Else the fewest of later priority, last in rank first, and only if it then
        fits: what they have computed is computed again.
        """
        victims: list[Sequence] = []
        if self._has_place(seq, cached_blocks, running, victims, max_num_seqs):
            return victims
        candidates = sorted(filter(seq.may_displace, running), key=lambda other: other.rank)
        is_worth_it = self._has_place(seq, cached_blocks, running, candidates, max_num_seqs)
        if self._reserve is Reserve.WORST or not is_worth_it:
            return None
        while not self._has_place(seq, cached_blocks, running, victims, max_num_seqs):
            victims.append(candidates.pop())
        return victims

    def _has_place(
        self,
        seq: Sequence,
        cached_blocks: list[int],
        running: list[Sequence],
        victims: list[Sequence],
        max_num_seqs: int,
    ) -> bool:
        gone = {victim.seq_id for victim in victims}
        staying = [other for other in running if other.seq_id not in gone]
        # What it finds in the cache stays where it is, whoever held it before.
        tables = (set(victim.block_table).difference(cached_blocks) for victim in victims)
        num_freed = self._pool.count_held_only_by(tables)
        return len(staying) < max_num_seqs and self.fits(seq, cached_blocks, staying, num_freed)

    def fits(
        self,
        seq: Sequence,
        cached_blocks: list[int],
        running: Iterable[Sequence],
        num_freed: int = 0,
    ) -> bool:
        """Say whether a waiting sequence may enter next to the running ones.

        ``num_freed`` blocks become free before it does.

        For one that was preempted the guess was wrong, so more growth is expected of everybody: no
        ping-pong. The worst case is kept for the second time, because with a large max_tokens it
        only fits once nearly everybody has left.
        """
        growth = self._expected_growth(seq.num_preemptions)
        reserved = sum(self._blocks_to_come(other, growth) for other in running)
        shared = len(cached_blocks) - self._pool.count_unreferenced(cached_blocks)
        num_free = self._pool.num_free + num_freed
        return self._blocks_to_come(seq, growth) - shared <= num_free - reserved

    def claimable_blocks(self, sequences: Iterable[Sequence]) -> int:
        """Return the blocks left for new work once everybody here has grown as expected."""
        growth = self._expected_growth()
        to_come = sum(self._blocks_to_come(seq, growth) for seq in sequences)
        return max(0, self._pool.num_free - to_come)

    def learn_from(self, seq: Sequence) -> None:
        """Take a sequence that leaves into account, if it has generated anything."""
        num_used = seq.num_output_tokens
        if num_used > 0:
            num_allowed = num_used + seq.remaining_output_tokens(self.max_model_len)
            self._growth.learn(num_used, num_allowed)

    def _expected_growth(self, num_preemptions: int = 0) -> float:
        if self._reserve is Reserve.WORST:
            return 1.0
        return math.pow(self._growth.share, _CAUTION[min(num_preemptions, len(_CAUTION) - 1)])

    def _blocks_to_come(self, seq: Sequence, growth: float) -> int:
        output = math.ceil(growth * seq.remaining_output_tokens(self.max_model_len))
        # The last token of all is sampled but never computed, so it takes no slot.
        num_slots = seq.num_tokens + max(0, output - 1)
        return self._pool.blocks_for(num_slots) - len(seq.block_table)
