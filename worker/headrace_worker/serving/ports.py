"""What serving needs from the queue; the transport implements it, and app wires the two.

Every method raises TransportError when Redis is unreachable or refuses: the caller tries again
later, and no request fails for it. Every method may be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.functions import (
    ClaimReply,
    EmitItem,
    EmitReply,
    FinishReply,
    Grant,
    Held,
    QueueDepth,
)
from headrace.protocol import ChunkMessage, TerminalMessage
from headrace.types import RequestState, RequestStatus


@dataclass(frozen=True, slots=True)
class RoomIfDisplaced:
    """What a request of sooner priority finds if running work gives way to it."""

    priority: int  # 0 soonest … 9: this one and all later ones give way
    free_seqs: int  # >= 0
    free_tokens: int  # KV slots, >= 0


@dataclass(frozen=True, slots=True)
class Room:
    """What this worker can take right now."""

    free_seqs: int  # >= 0
    free_tokens: int  # KV slots that nobody has claimed, <= total_tokens
    total_tokens: int  # KV slots of the whole cache
    if_displaced: tuple[RoomIfDisplaced, ...] = ()  # of each priority here, soonest first

    @property
    def is_full(self) -> bool:
        """Whether it only has room for those that others give way to."""
        return self.free_seqs < 1 or self.free_tokens < 1

    def exceeds(self, other: Room) -> bool:
        """Whether something may fit that did not fit the other."""
        mine = {left.priority: left for left in self.if_displaced}
        theirs = {left.priority: left for left in other.if_displaced}
        return (
            self.free_seqs > other.free_seqs
            or self.free_tokens > other.free_tokens
            or any(
                priority not in theirs
                or left.free_seqs > theirs[priority].free_seqs
                or left.free_tokens > theirs[priority].free_tokens
                for priority, left in mine.items()
            )
        )


class Queue(Protocol):
    """The queue, as one worker sees it."""

    async def claim(self, room: Room) -> ClaimReply:
        """Take what fits. After a failure the next call asks for the same grants again."""
        ...

    async def wait_for_work(self, cursor: str, timeout_s: float) -> None:
        """Sleep until there is news behind the cursor, or the time is over."""
        ...

    async def read_token_log(self, grant: Grant) -> tuple[ChunkMessage, ...]:
        """Return what earlier epochs emitted."""
        ...

    async def emit(self, items: Sequence[EmitItem]) -> tuple[EmitReply, ...]:
        """Append to token logs, one item a request."""
        ...

    async def finish(
        self, held: Held, num_tokens: int, state: RequestState, terminal: TerminalMessage
    ) -> FinishReply:
        """Publish the terminal entry, then acknowledge: one atomic step."""
        ...

    async def renew(self, held: Sequence[Held]) -> tuple[Held, ...]:
        """Prolong leases; return those that are lost."""
        ...

    async def release(self, held: Sequence[Held], *, strike: bool, cause: str = "") -> int:
        """Hand requests back, claimable at once; return how many were ours.

        ``strike``: the engine died with them, of the cause.
        """
        ...

    async def status(self, held: Held) -> RequestStatus | None:
        """Return what the queue knows of a request."""
        ...

    async def depth(self) -> QueueDepth:
        """Return true counts."""
        ...
