"""How large a step may be: as configured, and less for a while after the device's memory ran out.

Others may share the device, and what a step takes beyond the KV cache was only estimated. So a step
that found no memory is halved, and after some that did, the next may be twice as large again.
"""

from __future__ import annotations

from collections.abc import Collection

from headrace_worker.engine.schedule import ScheduledSequence

_GOOD_STEPS = 128  # before a reduced limit is doubled


class StepLimits:
    """Sequences and tokens of a step; there are never fewer tokens than sequences."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.num_seqs = self._max_num_seqs = max_num_seqs
        self.num_tokens = self._max_num_tokens = max_num_batched_tokens
        self._num_good_steps = 0  # since it was reduced or doubled last

    @property
    def is_reduced(self) -> bool:
        """Whether a step may be larger some day."""
        return self.num_seqs < self._max_num_seqs or self.num_tokens < self._max_num_tokens

    def halve(self, shares: Collection[ScheduledSequence]) -> None:
        """Allow half of what these shares are, but one token at least.

        Of a sequence alone the tokens are too many; how many others are running does not matter.
        """
        num_tokens = sum(share.num_new_tokens for share in shares)
        self.num_tokens = max(1, num_tokens // 2)
        if len(shares) > 1:
            self.num_seqs = len(shares) // 2
        self.num_seqs = min(self.num_seqs, self.num_tokens)
        self._num_good_steps = 0

    def note_good_step(self) -> None:
        """A step found memory; after some of these it may be larger again."""
        self._num_good_steps += 1
        if self._num_good_steps >= _GOOD_STEPS:
            self._num_good_steps = 0
            self.num_seqs = min(2 * self.num_seqs, self._max_num_seqs)
            self.num_tokens = min(2 * self.num_tokens, self._max_num_tokens)


def can_be_halved(shares: Collection[ScheduledSequence]) -> bool:
    """Whether there is anything smaller than these shares."""
    return sum(share.num_new_tokens for share in shares) > 1
