"""The keyword arguments of a request: which there are, and the checks of those for its delivery."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, TypedDict

from headrace.checks import check_integer, shown
from headrace.errors import InvalidRequest
from headrace.keys import LANES
from headrace.sampling import SamplingParams
from headrace.types import Message, Prompt

DEFAULT_PRIORITY = 5


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of every call that makes a request."""

    messages: Sequence[Message]  # instead of a prompt
    model: str  # must be the one that the queue's workers serve
    sampling: SamplingParams  # instead of the single options
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    seed: int | None
    n: int
    logprobs: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float] | None
    min_tokens: int
    ignore_eos: bool
    include_stop: bool
    bad_words: Sequence[str] | None
    prompt_logprobs: int | None
    echo: bool
    response_format: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None  # for the chat template, as are its variables
    chat_template_kwargs: Mapping[str, Any] | None
    priority: int  # 0 soonest … 9
    ttl: float  # seconds until the answer is worthless
    deadline: datetime | float  # the same as a point in time: aware datetime or Unix seconds
    tenant: str
    metadata: Mapping[str, Any]  # handed back with the completion
    request_id: str  # made by the client unless it is given


class PromptWithOptions(RequestOptions, total=False):
    """One item of generate_many that has options of its own."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Delivery:
    """When a request is wanted."""

    priority: int  # 0 soonest … 9
    ttl_ms: int | None  # from its arrival at Redis
    deadline_ms: int | None  # Unix time by Redis's clock


_SAMPLING_NAMES = frozenset(f.name for f in fields(SamplingParams))


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a name that is no option, with the nearest one that is."""
    known = RequestOptions.__annotations__
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidRequest(f"unknown option {shown(name)}{hint}")


def sampling_of(options: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling options, given together or one by one; raises InvalidRequest."""
    single = {name: value for name, value in options.items() if name in _SAMPLING_NAMES}
    sampling = options.get("sampling")
    if sampling is None:
        return SamplingParams(**single)
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequest(f"sampling must be SamplingParams, not {shown(sampling)}")
    if single:
        raise InvalidRequest(f"give sampling or single options, not both: {sorted(single)}")
    return sampling


def delivery_of(options: Mapping[str, Any], now_s: float) -> Delivery:
    """Return the delivery options, checked; ``now_s`` is Unix time. Raises InvalidRequest."""
    ttl, deadline = options.get("ttl"), options.get("deadline")
    if ttl is not None and deadline is not None:
        raise InvalidRequest(f"give ttl or deadline, not both: {shown(ttl)} and {shown(deadline)}")
    return Delivery(
        priority=check_priority(options.get("priority", DEFAULT_PRIORITY)),
        ttl_ms=None if ttl is None else milliseconds("ttl", ttl),
        deadline_ms=None if deadline is None else _deadline_ms(deadline, now_s),
    )


def check_priority(priority: Any) -> int:
    """Return the priority, or raise InvalidRequest that names it."""
    check_integer("priority", priority, 0, LANES - 1)
    return int(priority)


def _deadline_ms(deadline: object, now_s: float) -> int:
    at = deadline
    if isinstance(deadline, datetime):
        if deadline.tzinfo is None:
            raise InvalidRequest(f"deadline {deadline.isoformat()} has no time zone")
        at = deadline.timestamp()
    at_ms = milliseconds("deadline", at)
    if at_ms <= now_s * 1000:
        raise InvalidRequest(f"deadline {deadline!s} is over: it is {now_s:.3f} now")
    return at_ms


def milliseconds(name: str, seconds: object) -> int:
    """Return whole milliseconds, at least one; raises InvalidRequest."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    # Redis keeps times in 64 bits of milliseconds; 1e12 seconds are 30,000 years.
    if not is_number or not 0 < seconds < 1e12:  # type: ignore[operator]
        raise InvalidRequest(f"{name} must be a positive number of seconds, not {shown(seconds)}")
    return max(1, math.floor(seconds * 1000))  # type: ignore[operator]
