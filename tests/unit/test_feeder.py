"""The feeder: from grant to engine command, or to a typed end."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import ErrorCode, ProtocolError
from headrace.functions import Grant
from headrace.protocol import ChunkMessage, RequestMessage, encode_request
from headrace.sampling import SamplingParams
from headrace.types import TokenLogprob
from headrace_worker.engine.messages import (
    AddSequence,
    PromptLogprobs,
    SampledToken,
    SamplingSpec,
    TokenScore,
)
from headrace_worker.serving.capacity import Capacity
from headrace_worker.serving.feeder import Feeder
from headrace_worker.serving.intake import Intake
from headrace_worker.serving.request import LENGTH_REACHED, STOPPED, InFlight, Phase
from support.serving_parts import Books, make_grant, make_ready
from support.tokenizers import byte_level_tokenizer


class Feeding:
    """A feeder over a scripted queue and an engine that only takes note."""

    def __init__(self) -> None:
        self.books = Books()
        self.sent: list[AddSequence] = []
        self.capacity = Capacity(num_prefetch=1)
        self.feeder = Feeder(
            self.books.queue,
            self.books.ledger,
            self.capacity,
            self.books.reporter,
            make_intake=lambda ready: Intake(byte_level_tokenizer(), ready, "fake"),
            send=self.sent.append,
        )
        self.feeder.engine_started(make_ready(vocab_size=512))
        self.capacity.engine_started(make_ready())

    async def feed(self, grant: Grant) -> InFlight:
        """Claim and feed one."""
        request = self.books.ledger.claim(grant)
        assert request is not None
        await self.feeder.feed(request)
        return request


def granted(prompt: Any = (5, 6), options: dict[str, Any] | None = None, **fields: Any) -> Grant:
    """Return a grant whose payload is a request for eight tokens, with other options."""
    sampling = SamplingParams(max_tokens=8, seed=3, stop_token_ids=(70,), **(options or {}))
    message = RequestMessage("r1", "acme", sampling, prompt=prompt)
    return make_grant(payload=encode_request(message), **fields)


@pytest.fixture
def feeding() -> Feeding:
    """Give a feeder with an engine."""
    return Feeding()


async def test_a_fresh_request_is_sent_with_its_prompt(feeding: Feeding) -> None:
    """The engine hears of prompt, sampling, priority and the tenant's cache domain."""
    request = await feeding.feed(granted(priority=2))
    (command,) = feeding.sent
    assert (command.token_ids, command.num_prompt_tokens) == ((5, 6), 2)
    assert (command.sampling.max_tokens, command.sampling.seed) == (8, 3)
    assert (command.priority, command.seq_id) == (2, request.seq_id)
    assert command.salt
    assert request.phase is Phase.WAITING


async def test_a_takeover_is_sent_with_what_was_emitted(feeding: Feeding) -> None:
    """The engine prefills prompt and output, and the outbox goes on where the log ends."""
    feeding.books.queue.logs["r1"] = [80, 81, 82]
    request = await feeding.feed(granted(epoch=2, num_tokens=3))
    (command,) = feeding.sent
    assert command.token_ids == (5, 6, 80, 81, 82)
    assert command.num_prompt_tokens == 2
    assert request.outbox.num_acknowledged == 3


@pytest.mark.parametrize(
    ("emitted", "end"), [([80] * 8, LENGTH_REACHED), ([80, 70], STOPPED)], ids=["length", "stop"]
)
async def test_an_answer_that_is_complete_is_not_sent_to_the_engine(
    feeding: Feeding, emitted: list[int], end: object
) -> None:
    """Only its terminal entry was missing, and its reason is known."""
    feeding.books.queue.logs["r1"] = emitted
    request = await feeding.feed(granted(epoch=2, num_tokens=len(emitted)))
    assert feeding.sent == []
    assert request.end is end
    assert request.usage.prompt_tokens == 2


@pytest.mark.parametrize(
    ("emitted", "end"), [([80] * 8, LENGTH_REACHED), ([80, 70], STOPPED)], ids=["length", "stop"]
)
async def test_a_complete_answer_without_its_prompt_logprobs_is_computed_for_them_alone(
    feeding: Feeding, emitted: list[int], end: object
) -> None:
    """The engine hears of the prompt only; what it samples is dropped, and the first end stands."""
    feeding.books.queue.logs["r1"] = emitted
    grant = granted(options={"prompt_logprobs": 3, "logprobs": 1}, epoch=2, num_tokens=len(emitted))
    request = await feeding.feed(grant)
    (command,) = feeding.sent
    assert (command.token_ids, command.num_prompt_tokens) == ((5, 6), 2)
    assert command.sampling == SamplingSpec(max_tokens=1, seed=0, prompt_logprobs=3)
    ledger, seq_id = feeding.books.ledger, command.seq_id
    ledger.admitted(seq_id, 0)
    ledger.score_prompt(PromptLogprobs(seq_id, 1, (TokenScore(6, -0.5),)))
    ledger.record(SampledToken(seq_id, 99))
    ledger.engine_finished(seq_id, LENGTH_REACHED)
    assert request.end is end
    assert request.num_output_tokens == len(emitted)
    assert request.prompt_logprobs == (None, TokenLogprob(6, -0.5))


async def test_a_prompt_of_one_token_is_not_computed_for_its_logprobs(feeding: Feeding) -> None:
    """There are none, and the terminal entry says so."""
    feeding.books.queue.logs["r1"] = [80, 70]
    grant = granted((5,), {"prompt_logprobs": 3}, epoch=2, num_tokens=2)
    request = await feeding.feed(grant)
    assert (feeding.sent, request.end, request.prompt_logprobs) == ([], STOPPED, (None,))


async def test_a_bad_request_ends_with_its_code(feeding: Feeding) -> None:
    """What intake refuses never reaches the engine."""
    request = await feeding.feed(granted(prompt=(9999,)))
    assert feeding.sent == []
    assert request.end is not None
    assert request.end.code is ErrorCode.INVALID_REQUEST
    assert "9999" in request.end.message


async def test_a_log_shorter_than_the_queue_s_count_is_lost(feeding: Feeding) -> None:
    """Tokens that a reader may have seen cannot be made up."""
    feeding.books.queue.logs["r1"] = [80]
    request = await feeding.feed(granted(epoch=2, num_tokens=3))
    assert request.end is not None
    assert request.end.code is ErrorCode.LOST
    assert request.num_output_tokens == 3


async def test_an_unreadable_log_is_lost(feeding: Feeding) -> None:
    """Somebody wrote nonsense into it: the request ends, the worker goes on."""

    async def unreadable(grant: Grant) -> tuple[ChunkMessage, ...]:
        raise ProtocolError("unreadable chunk")

    feeding.books.queue.read_token_log = unreadable  # type: ignore[method-assign]
    request = await feeding.feed(granted(epoch=2, num_tokens=3))
    assert request.end is not None
    assert request.end.code is ErrorCode.LOST


async def test_a_library_that_trips_fails_that_request_alone(feeding: Feeding) -> None:
    """An exception that intake does not know is a fault of ours, not the end of the worker."""

    class Tripping:
        def prepare(self, *_args: Any, **_kwargs: Any) -> None:
            raise RuntimeError("already borrowed")

    feeding.feeder._intake = Tripping()  # type: ignore[assignment]
    request = await feeding.feed(granted())
    assert request.end is not None
    assert request.end.code is ErrorCode.ENGINE_FAILURE


async def test_a_request_that_left_while_it_was_prepared_is_not_sent(feeding: Feeding) -> None:
    """Its lease was lost meanwhile."""
    request = feeding.books.ledger.claim(granted())
    assert request is not None
    feeding.books.ledger.drop(request, "lease lost")
    await feeding.feeder.feed(request)
    assert feeding.sent == []


async def test_without_an_engine_the_request_is_handed_back(feeding: Feeding) -> None:
    """The engine died after the claim, and the next one would never hear of it."""
    feeding.capacity.engine_gone()
    request = await feeding.feed(granted())
    assert feeding.sent == []
    assert feeding.books.queue.released == [((request.held,), False)]


async def test_an_outage_while_the_log_is_read_is_waited_out(feeding: Feeding) -> None:
    """The request stays claimed until Redis answers again."""
    feeding.books.queue.logs["r1"] = [80]
    read, tries = feeding.books.queue.read_token_log, 0

    async def flaky(grant: Grant) -> tuple[ChunkMessage, ...]:
        nonlocal tries
        tries += 1
        feeding.books.queue.is_down = tries < 3
        return await read(grant)

    feeding.books.queue.read_token_log = flaky  # type: ignore[method-assign]
    request = await feeding.feed(granted(epoch=2, num_tokens=1))
    assert request.phase is Phase.WAITING
    assert tries == 3
