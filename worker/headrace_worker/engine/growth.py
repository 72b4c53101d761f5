"""How long answers get: the share of max_tokens that sequences use before they leave."""

from __future__ import annotations

_FIRST_GUESS = 0.5
_LEARNING_RATE = 1 / 32


class Growth:
    """Tokens generated over tokens allowed, both averaged over the last few dozen sequences.

    It is a ratio of means, not a mean of ratios: many short answers that use all of a small
    max_tokens say nothing about the few that are allowed a whole context.
    """

    def __init__(self) -> None:
        self._mean_allowed = 0.0  # tokens, 0 until the first sequence has left
        self._mean_used = 0.0  # tokens

    @property
    def share(self) -> float:
        """Expected share of max_tokens, in [0, 1]."""
        return self._mean_used / self._mean_allowed if self._mean_allowed else _FIRST_GUESS

    def learn(self, num_used: int, num_allowed: int) -> None:
        """Take a sequence into account that has left; 0 <= ``num_used`` <= ``num_allowed`` > 0."""
        if not self._mean_allowed:
            self._mean_allowed, self._mean_used = num_allowed, _FIRST_GUESS * num_allowed
        self._mean_allowed += (num_allowed - self._mean_allowed) * _LEARNING_RATE
        self._mean_used += (num_used - self._mean_used) * _LEARNING_RATE
