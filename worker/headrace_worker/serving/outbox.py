"""The tokens of one request on their way to its log: what Redis has, and what is still to send.

::

    0 ........ num_acknowledged ........ num_sent ........ num_tokens
    | the log holds these | an emit was tried | never sent  |

A lost reply leaves ``num_sent`` ahead of ``num_acknowledged``; the same slice goes out again, so
that Redis sees a replay and not a new write. All tokens are kept until the request ends: a Redis
that lost its last second answers with a gap, and the writer goes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.protocol import ChunkMessage
from headrace.types import TokenLogprob
from headrace_worker.engine.messages import SampledToken

MAX_SLICE_TOKENS = 1024  # of one log entry, far below what a chunk may hold


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One token with the text that it added."""

    token_id: int
    piece: str = ""  # empty while a character or a stop string is incomplete
    logprob: TokenLogprob | None = None  # if the request asked for it


@dataclass(frozen=True, slots=True)
class EmitPolicy:
    """How long tokens may wait for others; one flush is one write to Redis for all that is due."""

    interval_s: float = 0.05  # longest wait of a token that somebody streams
    max_tokens: int = 8  # of one request that wait; at this many it is due at once
    unattended_interval_s: float = 0.5  # the same for a request that nobody streams
    unattended_max_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [offset, offset + len(tokens)) of one request, for one log entry."""

    offset: int
    tokens: tuple[OutputToken, ...]

    @property
    def end(self) -> int:
        """Offset after the last token."""
        return self.offset + len(self.tokens)

    def to_message(self) -> ChunkMessage:
        """Return the log entry."""
        return ChunkMessage(
            token_ids=tuple(token.token_id for token in self.tokens),
            pieces=tuple(token.piece for token in self.tokens),
            logprobs=_logprobs(self.tokens),
        )


class Outbox:
    """Touched on the event loop only."""

    def __init__(
        self, policy: EmitPolicy, *, attached: bool, emitted: Iterable[OutputToken] = ()
    ) -> None:
        self._tokens = list(emitted)
        self.num_inherited = len(self._tokens)  # of earlier epochs
        self._oldest_unsent_at: float | None = None
        self._interval_s = policy.interval_s if attached else policy.unattended_interval_s
        self._max_tokens = policy.max_tokens if attached else policy.unattended_max_tokens
        self._hurries_first = attached
        self.num_acknowledged = self.num_inherited
        self.num_sent = self.num_inherited

    @property
    def num_tokens(self) -> int:
        """All output tokens, those of earlier epochs counted."""
        return len(self._tokens)

    @property
    def num_new_tokens(self) -> int:
        """Output tokens of this epoch."""
        return len(self._tokens) - self.num_inherited

    @property
    def num_unacknowledged(self) -> int:
        """Tokens that exist nowhere but here."""
        return len(self._tokens) - self.num_acknowledged

    def append(self, token: OutputToken, now: float) -> None:
        """Take the next token."""
        self._tokens.append(token)
        if self._oldest_unsent_at is None:
            self._oldest_unsent_at = now

    def due_at(self) -> float | None:
        """Return the monotonic second at which the next flush is due; None with nothing to send."""
        if self._oldest_unsent_at is None:
            return None
        is_first = self._hurries_first and self.num_acknowledged == self.num_inherited
        if is_first or self.num_unacknowledged >= self._max_tokens:
            return self._oldest_unsent_at
        return self._oldest_unsent_at + self._interval_s

    def next_slice(self) -> Slice | None:
        """Return what to send now, the slice of an unanswered emit first; None for nothing."""
        if self.num_unacknowledged == 0:
            return None
        if self.num_sent <= self.num_acknowledged:
            self.num_sent = min(len(self._tokens), self.num_acknowledged + MAX_SLICE_TOKENS)
        return Slice(
            self.num_acknowledged, tuple(self._tokens[self.num_acknowledged : self.num_sent])
        )

    def settle(self, num_tokens: int, now: float) -> bool:
        """Take Redis's word for how many tokens the log holds, more or fewer than was thought.

        Returns False when it holds more than were ever made here: then somebody else wrote them.
        """
        if num_tokens > len(self._tokens):
            return False
        self.num_acknowledged = self.num_sent = num_tokens
        self._oldest_unsent_at = now if self.num_unacknowledged else None
        return True


def from_chunks(chunks: Sequence[ChunkMessage]) -> list[OutputToken]:
    """Return the tokens of log entries, one by one."""
    return [
        OutputToken(token_id, piece, chunk.logprobs[index] if chunk.logprobs else None)
        for chunk in chunks
        for index, (token_id, piece) in enumerate(zip(chunk.token_ids, chunk.pieces, strict=True))
    ]


def output_token(token: SampledToken, piece: str) -> OutputToken:
    """Return the engine's token with the text that it added."""
    if token.logprob is None:
        return OutputToken(token.token_id, piece)
    logprob = TokenLogprob(token.token_id, token.logprob, token.top_logprobs)
    return OutputToken(token.token_id, piece, logprob)


def _logprobs(tokens: Sequence[OutputToken]) -> tuple[TokenLogprob, ...] | None:
    given = tuple(token.logprob for token in tokens if token.logprob is not None)
    return given if len(given) == len(tokens) else None
