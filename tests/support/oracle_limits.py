"""What a schedule over the oracle may draw of an engine's settings, and what it met."""

from __future__ import annotations

from dataclasses import dataclass, fields

from headrace_worker.engine.settings import Reserve


@dataclass(frozen=True, slots=True)
class Limits:
    """An engine's settings, as a schedule draws them."""

    num_blocks: int
    block_size: int  # tokens
    max_model_len: int  # tokens
    max_num_seqs: int
    budget: int  # tokens a step
    reserve: Reserve
    caching: bool
    poison: int | None  # token id after which the row is NaN
    is_hopeful: bool  # has learned that answers are short, so it admits many, and preempts
    is_fast: bool  # samples in plain lists
    has_graphs: bool  # replays its decodes, where it samples with tensors
    is_ahead: bool  # schedules a step while the last one is in flight

    @property
    def context(self) -> int:
        """Tokens of the longest sequence: the pool may be smaller than the context."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


@dataclass(slots=True)
class Tally:
    """What many schedules met; a check that never saw a preemption proves little about them."""

    schedules: int = 0
    steps: int = 0
    sequences: int = 0
    cached_sequences: int = 0  # that began with tokens from the prefix cache
    tokens: int = 0  # compared with the independent answer
    scores: int = 0  # of prompt tokens, compared in the same way
    near_ties: int = 0  # drawn at a border, where either token is right
    preemptions: int = 0
    displacements: int = 0  # of these, for a sooner priority
    takeovers: int = 0
    aborts: int = 0  # of sequences that were not over
    shortages: int = 0  # steps that were to find no memory
    breakdowns: int = 0  # of one sequence: a poisoned row, or a step that names it

    def __str__(self) -> str:
        return ", ".join(
            f"{f.name.replace('_', ' ')} {getattr(self, f.name)}" for f in fields(self)
        )
