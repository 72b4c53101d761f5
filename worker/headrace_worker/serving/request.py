"""One request in flight: its phase, its tokens, its clock.

::

    CLAIMED ─▶ WAITING ─▶ RUNNING ─▶ ENDING ─▶ FINISHED     the queue took the terminal entry
       │          │          │          ├────▶ DROPPED      the queue says that it is no longer ours
       └──────────┴──────────┴──────────┴────▶ RELEASED     handed back, unfinished

CLAIMED has no sequence yet (being tokenized); WAITING is with the engine, RUNNING was admitted
there at least once. Whoever ends a request moves it to ENDING with the reason; what is still unsent
goes out first, then the terminal entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from headrace.errors import ErrorCode
from headrace.functions import Grant, Held, WishedEnd
from headrace.types import FinishReason, RequestState, Timings, TokenLogprob, Usage
from headrace_worker.serving.intake import PreparedRequest
from headrace_worker.serving.outbox import Outbox
from headrace_worker.serving.prompt_scores import PromptScores


class Phase(StrEnum):
    """Where a request stands in this worker."""

    CLAIMED = "claimed"
    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    FINISHED = "finished"
    DROPPED = "dropped"
    RELEASED = "released"


_OVER = frozenset({Phase.FINISHED, Phase.DROPPED, Phase.RELEASED})
_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.CLAIMED: frozenset({Phase.WAITING, Phase.ENDING, Phase.DROPPED, Phase.RELEASED}),
    Phase.WAITING: frozenset({Phase.RUNNING, Phase.ENDING, Phase.DROPPED, Phase.RELEASED}),
    Phase.RUNNING: frozenset({Phase.ENDING, Phase.DROPPED, Phase.RELEASED}),
    Phase.ENDING: _OVER,
    **{phase: frozenset() for phase in _OVER},
}


@dataclass(frozen=True, slots=True)
class End:
    """How a request ends."""

    state: RequestState
    reason: FinishReason
    code: ErrorCode | None = None  # for FAILED and CANCELLED
    message: str = ""

    @property
    def is_early(self) -> bool:
        """Whether the answer is what there is by then, and no more is owed."""
        return self.reason in (FinishReason.DEADLINE, FinishReason.STOPPED_EARLY)

    @classmethod
    def failed(cls, code: ErrorCode, message: str) -> End:
        """The answer is "no"."""
        return cls(RequestState.FAILED, FinishReason.ERROR, code, message)


STOPPED = End(RequestState.FINISHED, FinishReason.STOP)
LENGTH_REACHED = End(RequestState.FINISHED, FinishReason.LENGTH)
CANCELLED = End(
    RequestState.CANCELLED, FinishReason.CANCELLED, ErrorCode.CANCELLED, "cancelled while running"
)
DEADLINE_PASSED = End(RequestState.FINISHED, FinishReason.DEADLINE)
STOPPED_EARLY = End(RequestState.FINISHED, FinishReason.STOPPED_EARLY)
END_OF_WISH = {WishedEnd.CANCEL: CANCELLED, WishedEnd.FINISH: STOPPED_EARLY}
SCORES_MISSING = End.failed(
    ErrorCode.ENGINE_FAILURE, "the engine finished without all of the prompt's logprobs"
)


@dataclass(slots=True)
class InFlight:
    """A granted request until it is finished, dropped or released; times are monotonic seconds."""

    grant: Grant
    outbox: Outbox
    claimed_at: float
    phase: Phase = Phase.CLAIMED
    prepared: PreparedRequest | None = None  # from WAITING on, unless it was refused
    seq_id: int | None = None  # the engine's name for it
    end: End | None = None  # from ENDING on
    admitted_at: float | None = None  # first admission
    first_token_at: float | None = None  # first one of this epoch
    last_token_at: float | None = None
    ended_at: float | None = None
    tail: str = ""  # text that was held back until the end
    prompt_scores: PromptScores = field(default_factory=PromptScores)  # of this epoch
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    num_preemptions: int = 0
    key: tuple[str, str] = field(init=False)  # tenant and request id
    priority: int = field(init=False)  # 0 soonest … 9; the grant's, until a client changes it

    def __post_init__(self) -> None:
        self.key = (self.grant.tenant, self.grant.request_id)
        self.priority = self.grant.priority

    def move_to(self, phase: Phase) -> None:
        """Change the phase; the only place that does."""
        assert phase in _TRANSITIONS[self.phase], f"{self.key}: {self.phase} → {phase}"
        self.phase = phase

    @property
    def is_live(self) -> bool:
        """Whether it is still ours to finish or to hand back."""
        return self.phase not in _OVER

    def is_overdue(self, now: float) -> bool:
        """Whether its deadline has passed while its end is open; ``now`` is a monotonic second."""
        return self.is_generating and self.deadline_at is not None and self.deadline_at <= now

    @property
    def is_generating(self) -> bool:
        """Whether its end is still open."""
        return self.phase in (Phase.CLAIMED, Phase.WAITING, Phase.RUNNING)

    @property
    def decided_end(self) -> End | None:
        """How the tokens of earlier epochs have ended it already; None where more are to come."""
        if self.prepared is None or self.prepared.finish_reason is None:
            return None
        return STOPPED if self.prepared.finish_reason is FinishReason.STOP else LENGTH_REACHED

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its terminal entry has to carry them."""
        return self.prepared is not None and self.prepared.sampling.prompt_logprobs is not None

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """One a token, the first None; None where not wanted, or not yet all here."""
        if self.prepared is None or not self.wants_prompt_logprobs:
            return None
        return self.prompt_scores.all_of(len(self.prepared.prompt_token_ids))

    @property
    def is_ready_to_finish(self) -> bool:
        """Whether only the terminal entry is missing."""
        return self.phase is Phase.ENDING and self.outbox.num_unacknowledged == 0

    @property
    def held(self) -> Held:
        """The queue's name for our hold on it."""
        return Held(self.grant.tenant, self.grant.request_id, self.grant.epoch)

    @property
    def num_output_tokens(self) -> int:
        """Tokens in its log once all are acknowledged; those of earlier epochs may be unread."""
        return max(self.outbox.num_tokens, self.grant.num_tokens)

    @property
    def deadline_at(self) -> float | None:
        """Monotonic second of its deadline, translated from Redis's clock when it was claimed."""
        if self.grant.deadline_ms is None:
            return None
        return self.claimed_at + (self.grant.deadline_ms - self.grant.now_ms) / 1000

    @property
    def enqueued_at(self) -> float:
        """Monotonic second at which it was enqueued, likewise."""
        return self.claimed_at - max(0, self.grant.now_ms - self.grant.enqueued_ms) / 1000

    @property
    def usage(self) -> Usage:
        """Token counts so far; of the prompt only once it was read."""
        return Usage(
            prompt_tokens=len(self.prepared.prompt_token_ids) if self.prepared else 0,
            completion_tokens=self.num_output_tokens,
            cached_tokens=self.num_cached_tokens,
        )

    @property
    def ttft_s(self) -> float | None:
        """Enqueue to first token; None where another worker sent it, and nobody here knows when."""
        if self.first_token_at is None or self.outbox.num_inherited > 0:
            return None
        return _non_negative(self.first_token_at - self.enqueued_at)

    def timings(self) -> Timings:
        """Return the seconds that its latency is made of, once it has ended."""
        assert self.ended_at is not None
        return Timings(
            queue_s=_non_negative((self.admitted_at or self.ended_at) - self.enqueued_at),
            ttft_s=self.ttft_s,
            tpot_s=self._tpot_s(),
            e2e_s=_non_negative(self.ended_at - self.enqueued_at),
        )

    def _tpot_s(self) -> float | None:
        if self.first_token_at is None or self.last_token_at is None:
            return None
        num_gaps = self.outbox.num_new_tokens - 1
        return (self.last_token_at - self.first_token_at) / num_gaps if num_gaps > 0 else None


def _non_negative(seconds: float) -> float:
    return max(0.0, seconds)
