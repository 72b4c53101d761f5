"""The options of a request, all the way: what a client asks for arrives, and what answers comes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace import InvalidRequest, RequestConflict, TokenLogprob
from headrace.packing import pack
from headrace.testing import FakeWorker
from support.any_client import AnyClient
from support.queue_driver import TENANT, QueueDriver

CHAT = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


async def test_every_new_option_reaches_the_worker(
    any_client: AnyClient, fake_worker: FakeWorker
) -> None:
    """The worker gets options, tools, variables and content parts as they were given."""
    options: dict[str, Any] = {
        "include_stop": True,
        "bad_words": ["no"],
        "prompt_logprobs": 2,
        "echo": True,
        "response_format": SCHEMA,
    }
    tools, variables = [{"type": "function"}], {"enable_thinking": False}
    answer = await any_client.generate(
        messages=CHAT, tools=tools, chat_template_kwargs=variables, **options
    )
    (request,) = fake_worker.requests
    sampling = request.sampling
    assert (sampling.include_stop, sampling.bad_words) == (True, ("no",))
    assert (sampling.prompt_logprobs, sampling.echo) == (2, True)
    assert sampling.response_format == {
        "type": "json_schema",
        "json_schema": {"schema": {"type": "object"}},
    }
    assert (request.messages, request.tools) == (tuple(CHAT), tuple(tools))
    assert request.chat_template_kwargs == variables
    assert answer.text == "HiHi"


async def test_every_answer_has_the_logprobs_of_its_prompt(
    any_client: AnyClient, fake_worker: FakeWorker
) -> None:
    """Each of n answers tells how likely the prompt was; who does not ask is told nothing."""
    expected = (None, TokenLogprob(ord("i"), 0.0))
    answer = await any_client.generate("Hi", prompt_logprobs=0, n=2)
    assert answer.prompt_logprobs == expected
    assert [choice.prompt_logprobs for choice in answer.choices] == [expected, expected]
    assert (await any_client.generate("Hi")).prompt_logprobs is None


async def test_who_attaches_late_has_the_logprobs_of_the_prompt(
    any_client: AnyClient, fake_worker: FakeWorker
) -> None:
    """They come with the end, so reading from a later token misses none of them."""
    first = await any_client.generate("Hi!", prompt_logprobs=0, request_id="r1")
    async with any_client.attach("r1", after=2) as stream:
        again = await stream.read()
    assert again.token_ids == (ord("!"),)
    assert again.prompt_logprobs == first.prompt_logprobs
    assert len(first.prompt_logprobs or ()) == 3


async def test_two_spellings_are_one_request(any_client: AnyClient, driver: QueueDriver) -> None:
    """What means the same attaches to the same request; another form is a conflict."""
    await any_client.submit("Hi", request_id="r1", response_format=SCHEMA, bad_words=[])
    shorter = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    await any_client.submit("Hi", request_id="r1", response_format=shorter, tools=None)
    assert driver.depth().queued == 1
    with pytest.raises(RequestConflict):
        await any_client.submit("Hi", request_id="r1", response_format={"type": "json_object"})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"tools": [{"type": "function"}]}, "tools needs messages"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs needs messages"),
    ],
)
async def test_what_is_refused_never_travels(
    any_client: AnyClient, driver: QueueDriver, options: dict[str, Any], named: str
) -> None:
    """A bad option is an InvalidRequest that names it, and the queue stays empty."""
    with pytest.raises(InvalidRequest, match=named):
        await any_client.submit("Hi", **options)
    assert driver.depth().queued == 0


@pytest.mark.parametrize(
    ("newer", "named"),
    [
        ({"priority_boost": 1}, "unknown request field 'priority_boost'"),
        ({"s": {"dry_multiplier": 0.8}}, "unknown sampling option 'dry_multiplier'"),
    ],
)
async def test_a_worker_refuses_what_a_newer_client_asks_for(
    any_client: AnyClient,
    driver: QueueDriver,
    fake_worker: FakeWorker,
    newer: dict[str, Any],
    named: str,
) -> None:
    """An option that it does not know is answered with its name, never left out."""
    driver.enqueue("r1", payload=pack({"v": 1, "id": "r1", "t": TENANT, "p": "Hi", **newer}))
    async with any_client.attach("r1") as stream:
        with pytest.raises(InvalidRequest, match=named):
            await stream.read()
