"""How much more this worker can take: free sequences and KV slots, as the engine last reported.

That report is a step old, so requests that the engine has not seen yet are subtracted at the cost
that the queue holds for them. There is no fixed concurrency: what does not fit stays in Redis,
where another worker can take it. A request that work of later priority gives way to is the
exception: it need not wait until something ends, so the queue is told what it would find.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from headrace_worker.engine.messages import EngineReady, StepOutcome
from headrace_worker.serving.ports import Room, RoomIfDisplaced

if TYPE_CHECKING:
    from headrace_worker.serving.request import InFlight


# Answers that Redis has not taken yet; at so many, or as many as may run, nothing more is claimed.
# Short ones are made faster than they are sent, and all that is held has its lease to be renewed.
MOST_ENDING = 64


class Capacity:
    """Touched on the event loop only."""

    def __init__(self, *, num_prefetch: int, gives_way: bool = True) -> None:
        self._num_prefetch = num_prefetch  # sequences that may wait in the engine for their turn
        self._gives_way = gives_way  # whether the engine displaces later priorities
        self._ready: EngineReady | None = None  # None: no engine
        self._free_blocks = 0
        self._num_waiting = 0
        self._num_sent = 0  # AddSequence commands so far
        self._unseen_costs: deque[int] = deque()  # tokens, of the commands not accounted for yet

    @property
    def is_open(self) -> bool:
        """Whether an engine runs."""
        return self._ready is not None

    def engine_started(self, ready: EngineReady) -> None:
        """Begin with an empty engine."""
        self._ready = ready
        self._free_blocks = ready.num_blocks
        self._num_waiting = self._num_sent = 0
        self._unseen_costs.clear()

    def engine_gone(self) -> None:
        """Take nothing until another engine has started."""
        self._ready = None

    def sequence_sent(self, cost: int) -> None:
        """Count a sequence that the engine will hear of."""
        self._num_sent += 1
        self._unseen_costs.append(cost)

    def step_done(self, outcome: StepOutcome) -> None:
        """Take the engine's report, which accounts for the first ``adds_seen`` sequences."""
        self._free_blocks = outcome.free_blocks
        self._num_waiting = outcome.num_waiting
        while len(self._unseen_costs) > self._num_sent - outcome.adds_seen:
            self._unseen_costs.popleft()

    def room(self, in_flight: Iterable[InFlight]) -> Room | None:
        """Return what can be claimed next to these requests; None when that is nothing."""
        if self._ready is None:
            return None
        held = list(in_flight)
        generating = [request for request in held if request.is_generating]
        if len(held) - len(generating) >= max(MOST_ENDING, self._ready.max_num_seqs):
            return None
        free_seqs = self._ready.max_num_seqs + self._num_prefetch - len(generating)
        free_tokens = self._free_blocks * self._ready.block_size - self._promised(generating)
        if free_seqs < 1 or free_tokens < 1 or self._num_waiting > self._num_prefetch:
            free_seqs = free_tokens = 0
        total_tokens = self._ready.max_kv_tokens
        beyond = self._if_displaced(self._ready, generating) if self._gives_way else ()
        if free_seqs < 1 and not any(left.free_seqs and left.free_tokens for left in beyond):
            return None
        return Room(free_seqs, free_tokens, total_tokens, beyond)

    def _if_displaced(
        self, ready: EngineReady, generating: Sequence[InFlight]
    ) -> tuple[RoomIfDisplaced, ...]:
        """Count with whole costs: displaced work must not be displaced again for more of the same.

        A priority of 0 is in nobody's way.
        """
        rooms = []
        for priority in sorted({r.priority for r in generating if r.priority > 0}):
            staying = [r for r in generating if r.priority < priority]
            free_tokens = ready.max_kv_tokens - sum(r.grant.cost for r in staying)
            free_seqs = ready.max_num_seqs - len(staying)
            rooms.append(RoomIfDisplaced(priority, max(0, free_seqs), max(0, free_tokens)))
        return tuple(rooms)

    def _promised(self, generating: Iterable[InFlight]) -> int:
        being_prepared = sum(r.grant.cost for r in generating if r.seq_id is None)
        return being_prepared + sum(self._unseen_costs)
