"""Requests whose answers are known before, and the checker that compares what Redis holds with
them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from headrace import functions
from headrace.keys import Keys
from headrace.protocol import CHUNK_FIELD, RequestMessage, decode_chunk, encode_request
from headrace.sampling import SamplingParams
from headrace.types import FinishReason
from support.fake_engine import fake_answer
from support.queue_driver import TENANT, QueueDriver
from support.tokenizers import byte_level_tokenizer
from support.waiting import eventually

RESULT_TTL_MS = 600_000


@dataclass(frozen=True, slots=True)
class Asked:
    """One request to the fake engine."""

    request_id: str
    prompt: tuple[int, ...] = (5, 6, 7)
    max_tokens: int = 20
    seed: int = 1
    sampling: dict[str, object] = field(default_factory=dict)  # other sampling options

    @property
    def answer(self) -> list[int]:
        """What any worker must emit, when nothing stops it before max_tokens."""
        return fake_answer(self.prompt, max_tokens=self.max_tokens, seed=self.seed)

    @property
    def payload(self) -> bytes:
        """The request on the wire."""
        options = {"max_tokens": self.max_tokens, "seed": self.seed, "ignore_eos": True}
        sampling = SamplingParams(**{**options, **self.sampling})  # type: ignore[arg-type]
        return encode_request(
            RequestMessage(self.request_id, TENANT, sampling, prompt=self.prompt, model="fake")
        )

    @property
    def cost(self) -> int:
        """Prompt and output."""
        return len(self.prompt) + self.max_tokens


def skewed(count: int, seed: int = 7, longest: int = 120) -> list[Asked]:
    """Return requests of very different lengths: mostly short, some long."""
    draw = random.Random(seed)
    return [
        Asked(
            f"r{number}",
            prompt=tuple(draw.randrange(3, 256) for _ in range(draw.choice((1, 4, 40)))),
            max_tokens=min(longest, 1 + int(draw.expovariate(1 / 25))),
            seed=draw.getrandbits(63),
        )
        for number in range(count)
    ]


def enqueue(driver: QueueDriver, *asked: Asked, **options: object) -> None:
    """Put requests into the queue."""
    for request in asked:
        driver.enqueue(
            request.request_id,
            **{
                "payload": request.payload,
                "cost": request.cost,
                "result_ttl_ms": RESULT_TTL_MS,
                **options,
            },
        )


def wait_for_ends(driver: QueueDriver, *asked: Asked, timeout_s: float = 30.0) -> None:
    """Return when all have their terminal state."""
    for request in asked:
        eventually(
            lambda rid=request.request_id: driver.status(rid).state.is_terminal,  # type: ignore[misc]
            timeout_s=timeout_s,
        )


def check_stream(driver: QueueDriver, asked: Asked) -> None:
    """Raise AssertionError unless the log holds the whole answer once, in order, and one end.

    Entry ids are the offsets behind each chunk, the text is that of the tokens, and the terminal
    entry agrees.
    """
    pieces, offset = [], 0
    for entry_id, name, value in driver.log(asked.request_id):
        if name == CHUNK_FIELD:
            chunk = decode_chunk(value)
            offset += len(chunk.token_ids)
            pieces += chunk.pieces
            assert entry_id == f"{offset}-0", f"{asked.request_id}: {entry_id} ends at {offset}"
    tokens, end = driver.tokens(asked.request_id), driver.end(asked.request_id)
    assert tokens == asked.answer, f"{asked.request_id}: wrong tokens"
    assert end.finish_reason is FinishReason.LENGTH, f"{asked.request_id}: {end}"
    assert "".join(pieces) + end.text == byte_level_tokenizer().decode(tokens)
    assert end.usage is not None
    assert end.usage.completion_tokens == len(tokens)


def is_drained(driver: QueueDriver) -> bool:
    """Whether nothing waits or runs, and no pending entry is left in any lane."""
    depth = driver.run(functions.depth(driver.keys))
    lanes = list(driver.client.scan_iter(f"{driver.keys.base}:in:*"))
    return (depth.queued, depth.running, depth.payload_bytes) == (0, 0, 0) and not lanes


def keys_of(name: str) -> Keys:
    """Return the key names of a queue."""
    return Keys(name)
