"""Requests whose answers are known before, and the checker that reads what Redis holds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from headrace import functions
from headrace.functions import EmitItem, Grant
from headrace.protocol import (
    ChunkMessage,
    RequestMessage,
    encode_chunk,
    encode_request,
)
from headrace.sampling import SamplingParams
from headrace.types import FinishReason
from headrace_worker.serving.detokenizer import Detokenizer
from headrace_worker.serving.tokenizer import Tokenizer
from support.fake_engine import fake_answer
from support.queue_driver import TENANT, LogEntry, QueueDriver, chunks_in, end_in
from support.tokenizers import byte_level_tokenizer
from support.waiting import PATIENCE_S, eventually

RESULT_TTL_MS = 600_000


@dataclass(frozen=True, slots=True)
class Asked:
    """One request to the fake engine."""

    request_id: str
    prompt: tuple[int, ...] = (5, 6, 7)
    max_tokens: int = 20
    seed: int = 1
    model: str = "fake"
    sampling: dict[str, object] = field(default_factory=dict)  # other sampling options
    priority: int = 5  # from 0, the soonest, to 9

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
            RequestMessage(self.request_id, TENANT, sampling, prompt=self.prompt, model=self.model)
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


def enqueue(driver: QueueDriver, *asked: Asked, **options: Any) -> None:
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


def wait_for_ends(driver: QueueDriver, *asked: Asked, timeout_s: float = PATIENCE_S) -> None:
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
    log = driver.log(asked.request_id)
    check_log(log, asked)
    offset, chunks, end = 0, chunks_in(log), end_in(log, asked.request_id)
    for (entry_id, *_), chunk in zip(log, chunks, strict=False):  # the end comes after all of them
        offset += len(chunk.token_ids)
        assert entry_id == f"{offset}-0", f"{asked.request_id}: {entry_id} ends at {offset}"
    text = "".join(piece for chunk in chunks for piece in chunk.pieces) + end.text
    assert text == _tokenizer().decode(asked.answer)
    assert end.usage is not None
    used = (end.usage.prompt_tokens, end.usage.completion_tokens)
    assert used == (len(asked.prompt), offset)


def check_answer(driver: QueueDriver, asked: Asked) -> None:
    """Raise AssertionError unless a reader sees each token once and then one end."""
    check_log(driver.log(asked.request_id), asked)


def check_log(log: Sequence[LogEntry], asked: Asked) -> None:
    """Do what ``check_answer`` does, for a log that was read."""
    tokens = [token for chunk in chunks_in(log) for token in chunk.token_ids]
    assert tokens == asked.answer, f"{asked.request_id}: wrong tokens"
    end = end_in(log, asked.request_id)
    assert end.finish_reason is FinishReason.LENGTH, f"{asked.request_id}: {end}"


def is_drained(driver: QueueDriver) -> bool:
    """Whether nothing waits or runs, and no pending entry is left in any lane."""
    depth = driver.run(functions.depth(driver.keys))
    lanes = list(driver.client.scan_iter(f"{driver.keys.base}:in:*"))
    return (depth.queued, depth.running, depth.payload_bytes) == (0, 0, 0) and not lanes


def emit_tokens(
    driver: QueueDriver, grant: Grant, tokens: Sequence[int], *, worker_id: str
) -> None:
    """Emit what a worker would, in one chunk, for a grant without tokens."""
    detokenizer = Detokenizer(_tokenizer().token_bytes)
    pieces = tuple(detokenizer.append(token).text for token in tokens)
    entry = encode_chunk(ChunkMessage(tuple(tokens), pieces))
    item = EmitItem(grant.tenant, grant.request_id, grant.epoch, 0, len(tokens), entry)
    assert driver.emit_all([item], worker_id)[0].offset == len(tokens)


def chunks_of(driver: QueueDriver, request_id: str) -> list[ChunkMessage]:
    """Return the chunks of a token log."""
    return chunks_in(driver.log(request_id))


def text_of(driver: QueueDriver, request_id: str) -> str:
    """Return the whole text of an ended request."""
    pieces = [piece for chunk in chunks_of(driver, request_id) for piece in chunk.pieces]
    return "".join(pieces) + driver.end(request_id).text


@cache
def _tokenizer() -> Tokenizer:
    """Return what the answers were made with; building it takes longer than to check a stream."""
    return byte_level_tokenizer()
