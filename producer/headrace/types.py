"""The values that a backend hands in and gets back: frozen, typed, without I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from headrace.errors import ConfigurationError

Prompt = str | list[int]
"""Text, or token ids that are used as they are."""

Message = dict[str, Any]
"""One chat message: ``{"role": "user", "content": "Hi"}``."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end of sequence, a stop token, or a stop string
    LENGTH = "length"  # max_tokens reached, or the context is full
    DEADLINE = "deadline"  # it passed while the request ran; the answer is what there was
    STOPPED_EARLY = "stopped_early"  # by finish_now; the answer is what there was
    CANCELLED = "cancelled"  # by a client
    ERROR = "error"  # see the terminal error


class RequestState(StrEnum):
    """Where a request stands in the queue."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether the request has had its one terminal answer."""
        return self not in (RequestState.QUEUED, RequestState.RUNNING)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was."""

    token_id: int
    logprob: float  # natural log, finite
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class Chunk:
    """One published piece of output."""

    index: int  # offset of its first token in the output, from 0
    token_ids: tuple[int, ...]
    text: str  # may be empty while a character or a stop string is incomplete
    choice: int = 0  # which of the n answers
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token, if asked for


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, as the worker that finished the request measured them."""

    queue_s: float  # enqueue to first admission
    ttft_s: float | None  # enqueue to first token; None when there was none
    tpot_s: float | None  # mean time per output token after the first; None below two tokens
    e2e_s: float  # enqueue to finish


@dataclass(frozen=True, slots=True)
class Completion:
    """The final result of one request."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings | None = None  # absent where no worker took part
    logprobs: tuple[TokenLogprob, ...] | None = None
    choices: tuple[Completion, ...] = ()  # all n answers when n > 1, this one included
    metadata: dict[str, Any] = field(default_factory=dict)  # of the call; empty after attach
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # one per token, first None


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """What the queue knows of a request right now."""

    request_id: str
    state: RequestState
    num_tokens: int  # tokens published so far
    epoch: int  # grants so far: 0 while never claimed
    strikes: int  # holders that vanished
    priority: int  # 0 soonest … 9
    owner: str | None  # worker that holds it
    enqueued_at_s: float  # Unix time by Redis's clock
    started_at_s: float | None = None  # first grant
    finished_at_s: float | None = None
    deadline_at_s: float | None = None
    finish_reason: FinishReason | None = None
    error_code: str | None = None
    error_message: str | None = None


@dataclass(frozen=True, slots=True)
class Timeout:
    """How long a reader waits, in seconds; every part is finite unless it is set to None."""

    first_chunk: float | None = 120.0  # from the call to the first chunk
    between_chunks: float | None = 60.0  # longest silence after the first
    total: float | None = 3600.0  # from the call to the terminal entry
    # How long enqueue, status and cancel go on trying without Redis; the client's own is used.
    redis: float | None = 10.0

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if value is not None and not _is_wait(value):
                raise ConfigurationError(
                    f"Timeout.{part.name} must be a positive number of seconds or None, "
                    f"not {value!r}"
                )


def _is_wait(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value < math.inf
