"""From arguments to calls: what is refused before any I/O, and what is sent."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

import pytest

from headrace.errors import InvalidRequest, Overloaded, QueueBound, RequestConflict
from headrace.keys import Keys
from headrace.options import DEFAULT_PRIORITY
from headrace.packing import MAX_PROMPT_TOKENS
from headrace.protocol import RequestMessage, decode_request
from headrace.replies import EnqueueOutcome, EnqueueReply
from headrace.sampling import DEFAULT_MAX_TOKENS, MAX_SEED, SamplingParams
from headrace.submission import Defaults, Submission, estimate_cost, prepare, refusal, seed_of
from headrace.types import RequestState

NOW_S = 1_700_000_000.0
DEFAULTS = Defaults(Keys("q"), "default", 3_600_000, None)

TOOL = {"type": "function", "function": {"name": "look_up", "description": "d" * 300}}


def submission(prompt: Any = "Hi", **options: Any) -> Submission:
    """Prepare a request."""
    return prepare(DEFAULTS, prompt, options, attached=True, now_s=NOW_S)


def message(prompt: Any = "Hi", **options: Any) -> RequestMessage:
    """Prepare a request of one part and decode its payload, as a worker does."""
    (part,) = submission(prompt, **options).parts
    payload = part.call.args[2]
    assert isinstance(payload, bytes)
    return decode_request(payload)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": []}, "prompt is empty"),
    ({"prompt": None}, "neither was given"),
    ({"messages": [{"role": "user", "content": "x"}]}, "both were given"),
    ({"prompt": None, "messages": []}, "messages is empty"),
    ({"prompt": None, "messages": "Hi"}, "messages must be a list"),
    ({"prompt": None, "messages": [{"content": "x"}]}, "role"),
    ({"prompt": None, "messages": [{"role": "user", "content": 1j}]}, "encoded"),
    ({"prompt": 5}, "int"),
    ({"prompt": b"Hi"}, "bytes"),
    ({"prompt": ["Hi"]}, "'Hi'"),
    ({"prompt": [1, -2]}, "-2"),
    ({"prompt": [1, True]}, "True"),
    ({"prompt": [1.0]}, "1.0"),
    ({"prompt": "\ud800"}, "surrogates"),
    ({"prompt": "x" * 2_100_000}, "at most 2097152"),
    ({"prompt": [1] * (MAX_PROMPT_TOKENS + 1)}, "array"),
    ({"temperature": math.nan}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"sampling": {"top_p": 1}}, "sampling must be SamplingParams"),
    ({"sampling": SamplingParams(), "top_p": 0.5}, "not both: ['top_p']"),
    ({"priority": 10}, "priority"),
    ({"priority": -1}, "priority"),
    ({"priority": True}, "priority"),
    ({"priority": 1.0}, "priority"),
    ({"ttl": 0}, "ttl"),
    ({"ttl": -1}, "ttl"),
    ({"ttl": math.inf}, "ttl"),
    ({"ttl": math.nan}, "ttl"),
    ({"ttl": "5s"}, "ttl"),
    ({"ttl": True}, "ttl"),
    ({"ttl": 5, "deadline": NOW_S + 5}, "ttl or deadline"),
    ({"deadline": NOW_S - 1}, "is over"),
    ({"deadline": datetime(2020, 1, 1)}, "has no time zone"),
    ({"deadline": "tomorrow"}, "deadline"),
    ({"tenant": "a b"}, "tenant"),
    ({"tenant": ""}, "tenant"),
    ({"tenant": 7}, "tenant"),
    ({"request_id": ""}, "request_id"),
    ({"request_id": "a\n"}, "request_id"),
    ({"request_id": "x" * 161}, "request_id"),
    ({"request_id": 42}, "request_id"),
    ({"request_id": "x" * 159, "n": 2}, "request_id"),
    ({"model": 7}, "model"),
    ({"metadata": [1]}, "metadata"),
    ({"metadata": "x"}, "metadata"),
    ({"metadata": {1: 2}}, "key of metadata"),
    ({"metadata": {"x": 1j}}, "metadata cannot be encoded"),
    ({"metadata": {"x": "y" * 20_000}}, "metadata has"),
    ({"tools": [TOOL]}, "tools needs messages"),
    ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs needs messages"),
    ({"tools": "f"}, "tools must be a list"),
    ({"chat_template_kwargs": {"messages": []}}, "must not set 'messages'"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"prompt": [1] * 20_000, "prompt_logprobs": 20}, "prompt_logprobs 20 over 20000"),
    ({"max_token": 5}, "did you mean 'max_tokens'"),
    ({"flavour": 5}, "unknown option 'flavour'"),
]


@pytest.mark.parametrize(("change", "named"), BAD, ids=[str(c)[:50] for c, _ in BAD])
def test_bad_argument_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    """Each bad argument raises InvalidRequest that names it; no I/O can have happened."""
    with pytest.raises(InvalidRequest) as caught:
        submission(**({"prompt": "Hi"} | change))
    assert named in caught.value.message


def test_refusal_knows_its_request() -> None:
    """An error about a request carries the id, so that one of many can be told."""
    with pytest.raises(InvalidRequest) as caught:
        submission("", request_id="order-42")
    assert caught.value.request_id == "order-42"


def test_id_is_made_before_the_first_try() -> None:
    """Without an id the client makes one, unique and fit for the wire."""
    ids = {submission().request_id for _ in range(100)}
    assert len(ids) == 100
    assert submission().is_own_id
    assert not submission(request_id="order-42").is_own_id


def test_same_arguments_make_the_same_payload() -> None:
    """Spellings that mean the same are the same request, so that a retry is no conflict."""
    one = submission(request_id="r", temperature=0, logit_bias={5: 1, 2: 3}, stop="x")
    two = submission(request_id="r", temperature=0.0, logit_bias={2: 3.0, "5": 1}, stop=["x"])
    assert one.parts[0].call.args == two.parts[0].call.args


def test_defaults_fill_in_what_a_call_leaves_out() -> None:
    """Queue, tenant, priority, result ttl and bounds come from the client."""
    (part,) = submission(request_id="r").parts
    tenant, request_id, _, cost, priority, *rest = part.call.args
    assert (tenant, request_id, priority) == ("default", "r", DEFAULT_PRIORITY)
    ttl, deadline, result_ttl, bound, attached, bound_of_tenant = rest
    assert (ttl, deadline, bound, bound_of_tenant) == ("", "", "", "")
    assert (result_ttl, attached) == (3_600_000, 1)
    assert part.log_key == Keys("q").token_log("default", "r")
    assert cost == 1 + DEFAULT_MAX_TOKENS


def test_options_may_come_together() -> None:
    """SamplingParams and single options are two ways to say the same."""
    single = message(request_id="r", top_p=0.5, max_tokens=7)
    assert message(request_id="r", sampling=SamplingParams(top_p=0.5, max_tokens=7)) == single


def test_seed_follows_from_the_id() -> None:
    """An unseeded request has the seed of its id, the same on every machine."""
    assert message(request_id="order-42").sampling.seed == seed_of("order-42")
    assert seed_of("order-42") == 10713700082408409587
    assert 0 <= seed_of("x") <= MAX_SEED


def test_given_seed_stays() -> None:
    """A seed of the caller's is sent as it is, zero too."""
    assert message(seed=0).sampling.seed == 0


def test_answers_become_requests() -> None:
    """n answers travel as n requests with neighbouring ids and seeds."""
    parts = submission(n=3, request_id="r", seed=5).parts
    payloads = [decode_request(part.call.args[2]) for part in parts]  # type: ignore[arg-type]
    assert [p.request_id for p in payloads] == ["r/0", "r/1", "r/2"]
    assert [p.sampling.seed for p in payloads] == [5, 6, 7]


@pytest.mark.parametrize(
    ("prompt", "options", "tokens"),
    [
        ([1] * 100, {"max_tokens": 28}, 128),
        ("x" * 300, {"max_tokens": 28}, 128),
        ("é" * 150, {"max_tokens": 28}, 128),
        ("x", {"max_tokens": None}, 1 + DEFAULT_MAX_TOKENS),
        (None, {"messages": [{"role": "user", "content": "x" * 296}], "max_tokens": 1}, 106),
        (None, {"messages": [{"role": "u", "content": [{"text": "abc"}]}], "max_tokens": 1}, 7),
    ],
)
def test_cost_is_estimated(prompt: Any, options: dict[str, Any], tokens: int) -> None:
    """Token ids count exactly, three bytes of text as a token, and the answer at its longest."""
    assert estimate_cost(message(prompt, **options)) == tokens


def test_answers_to_enqueue_become_errors() -> None:
    """CONFLICT and FULL are errors that carry what the caller needs; OK and DUPLICATE are none."""
    conflict = refusal(EnqueueReply(EnqueueOutcome.CONFLICT, RequestState.QUEUED), "r1")
    assert isinstance(conflict, RequestConflict)
    for bound, words in ((QueueBound.QUEUE, "queue is full"), (QueueBound.TENANT, "tenant's")):
        full = refusal(EnqueueReply(EnqueueOutcome.FULL, None, 2.5, bound), "r1")
        assert isinstance(full, Overloaded)
        assert (full.retry_after, full.request_id, full.bound) == (2.5, "r1", bound)
        assert words in full.message
    for outcome in (EnqueueOutcome.OK, EnqueueOutcome.DUPLICATE):
        assert refusal(EnqueueReply(outcome, RequestState.QUEUED), "r1") is None


def test_tools_and_variables_travel_with_a_chat() -> None:
    """What the template needs is in the payload; nothing asked for is nothing sent."""
    chat = [{"role": "user", "content": "Hi"}]
    sent = message(None, messages=chat, tools=(TOOL,), chat_template_kwargs={"x": [1]})
    assert (sent.tools, sent.chat_template_kwargs) == ((TOOL,), {"x": [1]})
    bare = message(None, messages=chat, tools=None, chat_template_kwargs=None, request_id="r")
    assert bare == message(None, messages=chat, tools=[], chat_template_kwargs={}, request_id="r")
    assert (bare.tools, bare.chat_template_kwargs) == ((), {})


def test_tools_cost_tokens() -> None:
    """The template writes the tools into the prompt, so they are part of its estimate."""
    chat = [{"role": "user", "content": "Hi"}]
    with_tools = message(None, messages=chat, tools=[TOOL], max_tokens=1)
    assert estimate_cost(with_tools) > 100 + estimate_cost(
        message(None, messages=chat, max_tokens=1)
    )
