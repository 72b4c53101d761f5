"""A sequence: one request's tokens inside the engine, and how far they have been computed."""

from __future__ import annotations

from enum import Enum

from headrace_worker.engine.grammar import GrammarState
from headrace_worker.engine.messages import AddSequence, SequenceFinish

AGEING_STEPS = 512
"""After so many steps a sequence has caught up with newcomers of the next sooner priority."""


class SequenceStatus(Enum):
    """Where a sequence stands; FINISHED is the end, however it came about."""

    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"  # holds blocks for its computed tokens
    FINISHED = "finished"  # holds no blocks, and never comes back


_ALLOWED = {
    SequenceStatus.WAITING: {SequenceStatus.RUNNING, SequenceStatus.FINISHED},
    SequenceStatus.RUNNING: {SequenceStatus.WAITING, SequenceStatus.FINISHED},
    SequenceStatus.FINISHED: set[SequenceStatus](),
}


class Sequence:
    """Tokens, block table and progress of one request.

    ``token_ids`` grows by one for each sampled token and never shrinks; the others describe the KV
    cache::

        token_ids   | prompt ............ | output ..... | pending |
                    0                     num_prompt               num_tokens
        KV cache    | cached | computed ...... |  to compute: num_uncomputed_tokens

    A pending token is one that a step in flight samples: it counts, but only the device knows it.
    """

    __slots__ = (
        "arrival",
        "arrival_step",
        "block_digests",
        "block_table",
        "ended",
        "grammar",
        "grammar_renewed_at",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_scored_tokens",
        "num_steps_in_flight",
        "priority",
        "salt",
        "sampling",
        "seq_id",
        "status",
        "stop_token_ids",
        "token_ids",
        "was_admitted",
    )

    def __init__(self, command: AddSequence, arrival: int, arrival_step: int = 0) -> None:
        self.seq_id = command.seq_id
        self.token_ids = list(command.token_ids)
        self.num_prompt_tokens = command.num_prompt_tokens
        self.sampling = command.sampling
        self.stop_token_ids = frozenset(command.sampling.stop_token_ids)
        self.grammar: GrammarState | None = None  # of the output; None: any token may come
        # Output tokens when its grammar was compiled again, after it had failed; None: never.
        self.grammar_renewed_at: int | None = None
        self.priority = command.priority
        self.salt = command.salt
        self.arrival = arrival  # order of arrival in this engine, kept through preemptions
        self.arrival_step = arrival_step  # steps of the engine before it
        self.status = SequenceStatus.WAITING
        # Block b of the table holds tokens [b * block_size, (b + 1) * block_size).
        self.block_table: list[int] = []
        self.block_digests: list[bytes] = []  # prefix-cache keys of full blocks, computed on demand
        self.num_registered_blocks = 0  # leading blocks of the table that the prefix cache knows
        # Leading tokens whose keys and values are in the cache, or will be by steps in flight.
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0  # 0 to 2, one for each step in flight that samples it
        self.num_steps_in_flight = 0  # 0 to 2, that may still write to its blocks
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache at first admission
        # Leading prompt tokens whose scores were told, or were never owed: those of the first.
        is_scored = command.sampling.prompt_logprobs is not None
        self.num_scored_tokens = (
            min(1, self.num_prompt_tokens) if is_scored else self.num_prompt_tokens
        )
        self.ended: SequenceFinish | None = None  # came here over, but for scores that it owes
        self.num_preemptions = 0
        self.was_admitted = False

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: who is served first; the greatest is preempted first.

        A place ahead in priority is worth so many steps and no more, so nobody waits for ever
        behind a stream of sooner ones. It needs no clock: all that wait age at the same pace.
        """
        return (self.priority * AGEING_STEPS + self.arrival_step, self.arrival)

    def may_displace(self, other: Sequence) -> bool:
        """Whether another one has to give way to it: a later priority that has not aged past it."""
        return other.priority > self.priority and other.rank > self.rank

    @property
    def num_tokens(self) -> int:
        """Prompt and output together."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens since the prompt, those of earlier epochs included."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """What the scheduler has to run: 1 for a decode, more for a prefill."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def num_unscored_tokens(self) -> int:
        """Prompt tokens whose scores are still owed."""
        return self.num_prompt_tokens - self.num_scored_tokens

    @property
    def needs_tokens_told(self) -> bool:
        """Whether its tokens must be known on the host before its next step can be sampled.

        What it asks for depends on them, or is told with them.
        """
        spec = self.sampling
        return bool(
            spec.grammar is not None
            or spec.repetition_penalty != 1
            or spec.presence_penalty
            or spec.frequency_penalty
            or spec.bad_words
            or spec.logprobs is not None
        )

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens that need not be computed where the prefix cache has them.

        The next token to be scored needs the logits of the one before it, and so does the next
        token to be sampled.
        """
        return (self.num_scored_tokens if self.num_unscored_tokens else self.num_tokens) - 1

    def ends_with(self, token_ids: list[int]) -> bool:
        """Whether these are its last tokens; none always are."""
        return self.token_ids[len(self.token_ids) - len(token_ids) :] == token_ids

    def remaining_output_tokens(self, max_model_len: int) -> int:
        """Most tokens it may still generate."""
        room = max_model_len - self.num_tokens
        return max(0, min(self.sampling.max_tokens - self.num_output_tokens, room))

    def finish_reason(self, max_model_len: int) -> SequenceFinish | None:
        """Why it is over as far as its tokens are known, or None while it has to go on."""
        has_output = len(self.token_ids) > self.num_prompt_tokens
        if has_output and self.token_ids[-1] in self.stop_token_ids:
            return SequenceFinish.STOP
        if self.grammar is not None and self.grammar.is_complete:
            return SequenceFinish.STOP
        if self.remaining_output_tokens(max_model_len) + self.num_pending_tokens == 0:
            return SequenceFinish.LENGTH
        return None

    def follow(self, grammar: GrammarState) -> None:
        """Take from now on only tokens of a grammar, which is where the output stands.

        Its end is an end of the sequence, even for one that ignores those of the model.
        """
        self.grammar = grammar
        self.stop_token_ids |= grammar.tokens.eos_token_ids

    def start(self, cached_blocks: list[int], num_cached_tokens: int) -> None:
        """Enter the running set on top of blocks found in the prefix cache."""
        self._move_to(SequenceStatus.RUNNING)
        self.block_table = list(cached_blocks)
        self.num_registered_blocks = len(cached_blocks)
        self.num_computed_tokens = num_cached_tokens
        if not self.was_admitted:
            self.num_cached_tokens = min(num_cached_tokens, self.num_prompt_tokens)
            self.was_admitted = True

    def preempt(self) -> list[int]:
        """Go back to waiting, as its growth was misjudged; return the blocks to free."""
        self.num_preemptions += 1
        return self.give_way()

    def give_way(self) -> list[int]:
        """Go back to waiting with nothing computed; return the blocks to free."""
        self._move_to(SequenceStatus.WAITING)
        return self._give_up_blocks()

    def finish(self) -> list[int]:
        """End, in whatever state it is; return the blocks to free."""
        self._move_to(SequenceStatus.FINISHED)
        return self._give_up_blocks()

    def _give_up_blocks(self) -> list[int]:
        blocks, self.block_table = self.block_table, []
        self.num_computed_tokens = 0
        return blocks

    def _move_to(self, status: SequenceStatus) -> None:
        if status not in _ALLOWED[self.status]:
            raise RuntimeError(
                f"sequence {self.seq_id} cannot go from {self.status.value} to {status.value}"
            )
        self.status = status
