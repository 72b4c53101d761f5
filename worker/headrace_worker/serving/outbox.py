"""The tokens of one request on their way to its log: what Redis has, and what is still to send.

::

    0 ........ num_acknowledged ........ num_sent ........ num_tokens
    | the log holds these | an emit was tried | never sent  |

A lost reply leaves ``num_sent`` ahead of ``num_acknowledged``; the same slice goes out again, so
that Redis sees a replay and not a new write. All tokens are kept until the request ends: a Redis
that lost its last second answers with a gap, and the writer goes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.protocol import ChunkMessage
from headrace.types import TokenLogprob

MAX_SLICE_TOKENS = 1024  # of one log entry, far below what a chunk may hold


@dataclass(frozen=True, slots=True)
class EmitPolicy:
    """How long tokens may wait for others; one flush is one write to Redis for all that is due."""

    interval_s: float = 0.05  # longest wait of a token that somebody streams
    max_tokens: int = 8  # of one request that wait; at this many it is due at once
    # The same for a request that nobody streams: rarely, and still sooner than a client that has
    # heard nothing for a second asks what became of its request.
    unattended_interval_s: float = 0.75
    unattended_max_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [offset, end) of one request, for one log entry."""

    offset: int
    message: ChunkMessage  # the log entry

    @property
    def num_tokens(self) -> int:
        """At least one."""
        return len(self.message.token_ids)

    @property
    def end(self) -> int:
        """Offset after the last token."""
        return self.offset + self.num_tokens


class Outbox:
    """Touched on the event loop only; columns, not an object a token, as it is met at every one."""

    def __init__(
        self, policy: EmitPolicy, *, attached: bool, emitted: Iterable[ChunkMessage] = ()
    ) -> None:
        self._token_ids: list[int] = []
        self._pieces: list[str] = []  # text that each token added
        self._logprobs: dict[int, TokenLogprob] = {}  # by offset, if the request asked for them
        for chunk in emitted:
            self._logprobs.update(enumerate(chunk.logprobs or (), len(self._token_ids)))
            self._token_ids += chunk.token_ids
            self._pieces += chunk.pieces
        self.num_inherited = len(self._token_ids)  # of earlier epochs
        self._oldest_unsent_at: float | None = None
        self._interval_s = policy.interval_s if attached else policy.unattended_interval_s
        self._max_tokens = policy.max_tokens if attached else policy.unattended_max_tokens
        self._hurries_first = attached
        self.num_acknowledged = self.num_inherited
        self.num_sent = self.num_inherited
        self.num_unacknowledged = 0  # tokens that exist nowhere but here

    @property
    def num_tokens(self) -> int:
        """All output tokens, those of earlier epochs counted."""
        return len(self._token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Output tokens of this epoch."""
        return len(self._token_ids) - self.num_inherited

    def append(
        self, token_id: int, piece: str, now: float, logprob: TokenLogprob | None = None
    ) -> None:
        """Take the next token with the text that it added: none while a character is incomplete."""
        if logprob is not None:
            self._logprobs[len(self._token_ids)] = logprob
        self._token_ids.append(token_id)
        self._pieces.append(piece)
        self.num_unacknowledged += 1
        if self._oldest_unsent_at is None:
            self._oldest_unsent_at = now

    def due_at(self, next_step_at: float | None = None) -> float | None:
        """Return the monotonic second at which the next flush is due; None with nothing to send.

        Tokens do not wait where no others will have come by then: with an engine whose next step
        ends later (``next_step_at``, if anybody knows), they go out as they come.
        """
        oldest_at = self._oldest_unsent_at
        if oldest_at is None:
            return None
        is_first = self._hurries_first and self.num_acknowledged == self.num_inherited
        if is_first or self.num_unacknowledged >= self._max_tokens:
            return oldest_at
        due_at = oldest_at + self._interval_s
        return due_at if next_step_at is None or next_step_at < due_at else oldest_at

    def next_slice(self) -> Slice | None:
        """Return what to send now, the slice of an unanswered emit first; None for nothing."""
        start, num_tokens = self.num_acknowledged, len(self._token_ids)
        if start == num_tokens:
            return None
        if self.num_sent <= start:
            self.num_sent = min(num_tokens, start + MAX_SLICE_TOKENS)
        stop = self.num_sent
        token_ids, pieces = tuple(self._token_ids[start:stop]), tuple(self._pieces[start:stop])
        logprobs = self._logprobs_of(start, stop) if self._logprobs else None
        return Slice(start, ChunkMessage(token_ids, pieces, logprobs))

    def settle(self, num_tokens: int, now: float) -> bool:
        """Take Redis's word for how many tokens the log holds, more or fewer than was thought.

        Returns False when it holds more than were ever made here: then somebody else wrote them.
        """
        if num_tokens > len(self._token_ids):
            return False
        self.num_acknowledged = self.num_sent = num_tokens
        self.num_unacknowledged = len(self._token_ids) - num_tokens
        self._oldest_unsent_at = now if self.num_unacknowledged else None
        return True

    def _logprobs_of(self, start: int, stop: int) -> tuple[TokenLogprob, ...] | None:
        known = [self._logprobs.get(offset) for offset in range(start, stop)]
        told = tuple(logprob for logprob in known if logprob is not None)
        return told if len(told) == stop - start else None
