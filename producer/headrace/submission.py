"""From arguments to what is sent, without I/O: one enqueue call per answer that is asked for.

Everything that a client can see to be wrong is refused here, before the first byte travels.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from headrace.calls import Call, enqueue
from headrace.errors import (
    InvalidRequest,
    Overloaded,
    QueueBound,
    RequestConflict,
    RequestError,
)
from headrace.groups import member_id
from headrace.keys import Keys, check_request_id, check_tenant
from headrace.metadata import checked_metadata
from headrace.options import Delivery, delivery_of, refuse_unknown, sampling_of
from headrace.protocol import RequestMessage, decode_request, encode_request
from headrace.replies import EnqueueOutcome, EnqueueReply
from headrace.sampling import DEFAULT_MAX_TOKENS, MAX_SEED, SamplingParams
from headrace.template_options import normal_template_kwargs, normal_tools
from headrace.types import Prompt

BYTES_PER_TOKEN = 3
"""A cautious guess for text: English has about four bytes a token, other scripts fewer."""

TOKENS_PER_MESSAGE = 4
"""What a chat template adds around one message, roughly."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a client fills in where a call says nothing."""

    keys: Keys
    tenant: str
    result_ttl_ms: int  # how long a result outlives its end
    max_queued: int | None  # bound of the queue; None: unbounded
    max_queued_per_tenant: int | None = None  # likewise of a tenant


@dataclass(frozen=True, slots=True)
class Part:
    """One of the n requests that a call turns into."""

    request_id: str
    log_key: str
    call: Call[EnqueueReply]


@dataclass(frozen=True, slots=True)
class Submission:
    """One call, ready to be sent."""

    request_id: str  # the one the caller knows
    is_own_id: bool  # made here, so nobody else can come back to it
    tenant: str
    metadata: Mapping[str, Any]
    parts: tuple[Part, ...]  # part i becomes choice i

    @property
    def part_ids(self) -> list[str]:
        """Names of the requests that travel."""
        return [part.request_id for part in self.parts]


def prepare(
    defaults: Defaults,
    prompt: Prompt | None,
    options: Mapping[str, Any],
    *,
    attached: bool,
    now_s: float,
) -> Submission:
    """Check the arguments and build the calls.

    ``attached`` says that somebody watches the chunks come; ``now_s`` is Unix time. Raises
    InvalidRequest that names the value at fault.
    """
    request_id = options.get("request_id")
    given_id = uuid.uuid4().hex if request_id is None else request_id
    try:
        return _prepare(defaults, prompt, options, given_id, attached=attached, now_s=now_s)
    except InvalidRequest as error:
        error.request_id = given_id if isinstance(given_id, str) else None
        raise


def refusal(reply: EnqueueReply, request_id: str) -> RequestError | None:
    """Return the error that an answer to enqueue stands for, not raised; None: it was taken."""
    if reply.outcome is EnqueueOutcome.CONFLICT:
        message = "the id is taken by a request with another payload"
        return RequestConflict(message, request_id=request_id)
    if reply.outcome is EnqueueOutcome.FULL:
        delay_s = 1.0 if reply.retry_after_s is None else reply.retry_after_s
        bound = reply.bound or QueueBound.QUEUE
        what = "the queue is full" if bound is QueueBound.QUEUE else "the tenant's share is full"
        message = f"{what}; try again in {delay_s:g} s"
        return Overloaded(message, request_id=request_id, retry_after_s=delay_s, bound=bound)
    return None


def seed_of(request_id: str) -> int:
    """Return the seed of an unseeded request: a resubmission draws the same tokens."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "big")


def estimate_cost(message: RequestMessage) -> int:
    """Return roughly how many tokens prompt and answer need together; token ids are exact."""
    wanted = message.sampling.max_tokens
    return _prompt_tokens(message) + (DEFAULT_MAX_TOKENS if wanted is None else wanted)


def _prepare(
    defaults: Defaults,
    prompt: Prompt | None,
    options: Mapping[str, Any],
    request_id: str,
    *,
    attached: bool,
    now_s: float,
) -> Submission:
    refuse_unknown(options)
    check_request_id(request_id)
    sampling = sampling_of(options)
    tenant = check_tenant(options.get("tenant", defaults.tenant))
    metadata = options.get("metadata") or {}
    message = RequestMessage(
        request_id=request_id,
        tenant=tenant,
        sampling=replace(sampling, n=1),
        prompt=_plain_prompt(prompt),
        messages=_plain_messages(options.get("messages")),
        model=options.get("model"),
        metadata=metadata if not isinstance(metadata, Mapping) else dict(metadata),
        tools=normal_tools(options.get("tools")),
        chat_template_kwargs=normal_template_kwargs(options.get("chat_template_kwargs")),
    )
    checked_metadata(message.metadata)
    delivery = delivery_of(options, now_s)
    parts = tuple(
        _part(defaults, child, delivery, attached=attached) for child in _expand(message, sampling)
    )
    return Submission(request_id, options.get("request_id") is None, tenant, metadata, parts)


def _expand(message: RequestMessage, sampling: SamplingParams) -> list[RequestMessage]:
    """Turn n answers into n requests with neighbouring seeds; one answer keeps its id."""
    seed = seed_of(message.request_id) if sampling.seed is None else sampling.seed
    if sampling.n == 1:
        return [replace(message, sampling=replace(message.sampling, seed=seed))]
    return [
        replace(
            message,
            request_id=check_request_id(member_id(message.request_id, i)),
            sampling=replace(message.sampling, seed=(seed + i) & MAX_SEED),
        )
        for i in range(sampling.n)
    ]


def _part(
    defaults: Defaults,
    message: RequestMessage,
    delivery: Delivery,
    *,
    attached: bool,
) -> Part:
    payload = encode_request(message)
    decode_request(payload)  # what a worker would refuse is refused here, by the same rules
    call = enqueue(
        defaults.keys,
        tenant=message.tenant,
        request_id=message.request_id,
        payload=payload,
        cost=estimate_cost(message),
        priority=delivery.priority,
        ttl_ms=delivery.ttl_ms,
        deadline_ms=delivery.deadline_ms,
        result_ttl_ms=defaults.result_ttl_ms,
        max_queued=defaults.max_queued,
        max_queued_per_tenant=defaults.max_queued_per_tenant,
        attached=attached,
    )
    log_key = defaults.keys.token_log(message.tenant, message.request_id)
    return Part(message.request_id, log_key, call)


def _plain_prompt(prompt: object) -> Any:
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray)
    return tuple(prompt) if is_list else prompt  # type: ignore[arg-type]


def _plain_messages(messages: object) -> Any:
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    return tuple(messages) if is_list else messages  # type: ignore[arg-type]


def _prompt_tokens(message: RequestMessage) -> int:
    if isinstance(message.prompt, str):
        return _text_tokens(message.prompt)
    if message.prompt is not None:
        return len(message.prompt)
    said = sum(TOKENS_PER_MESSAGE + _content_tokens(m) for m in message.messages or ())
    return said + _content_tokens(message.tools)


def _content_tokens(value: object) -> int:
    if isinstance(value, str):
        return _text_tokens(value)
    if isinstance(value, Mapping):
        return sum(_content_tokens(item) for item in value.values())
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return sum(_content_tokens(item) for item in value)
    return 0


def _text_tokens(text: str) -> int:
    return math.ceil(len(text.encode()) / BYTES_PER_TOKEN)
