"""What one step runs: each sequence's share of the token budget, and what it does to the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from headrace_worker.engine.sequence import Sequence


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

    @property
    def must_land_first(self) -> bool:
        """Whether the next step cannot be scheduled before this share's results are told."""
        return bool(self.scored) or (self.samples and self.seq.needs_tokens_told)


@dataclass(slots=True)
class Schedule:
    """What one step will run."""

    budget_left: int  # tokens
    is_ahead: bool = False  # whether the step before it is still in flight
    # Whether somebody would have had to give way, which waits until nothing is in flight.
    is_held_up: bool = False
    scheduled: dict[int, ScheduledSequence] = field(default_factory=dict)  # by seq_id
    fills: dict[int, list[bytes]] = field(default_factory=dict)  # digests, of prefills by seq_id
    fills_in_flight: frozenset[bytes] = frozenset()  # digests, of the step in flight
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

    def in_batch_order(self) -> list[ScheduledSequence]:
        """Return the shares as the packed batch has them: decodes first, then chunks."""
        return sorted(self.scheduled.values(), key=lambda share: share.num_new_tokens > 1)

    @property
    def filled(self) -> set[bytes]:
        """Digests of the blocks that prefills fill, its own and those of the step in flight."""
        return set(chain(self.fills_in_flight, *self.fills.values()))
