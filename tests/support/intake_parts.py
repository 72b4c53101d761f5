"""An intake over a byte tokenizer, and requests that reach it through the wire format."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.protocol import ChunkMessage, RequestMessage, encode_request
from headrace.sampling import SamplingParams
from headrace_worker.engine.messages import EngineReady
from headrace_worker.serving.intake import Intake, PreparedRequest
from support.tokenizers import EOS_ID, byte_ids, byte_level_tokenizer

CONTEXT, BLOCK_SIZE, NUM_BLOCKS = 64, 16, 8  # tokens, tokens, blocks
READY = EngineReady(
    model="tiny",
    device="cpu",
    dtype="float32",
    attention_backend="reference",
    vocab_size=320,
    max_model_len=CONTEXT,
    block_size=BLOCK_SIZE,
    num_blocks=NUM_BLOCKS,
    memory_budget_bytes=1 << 20,
    weights_bytes=1 << 18,
    activation_bytes=1 << 16,
    kv_bytes_per_token=256,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    load_s=0.5,
)
TOKENIZER = byte_level_tokenizer(eos_token_ids=frozenset({EOS_ID, 9}))
INTAKE = Intake(TOKENIZER, READY, "tiny")


def prepare(
    intake: Intake = INTAKE,
    *,
    emitted: tuple[ChunkMessage, ...] = (),
    prompt: str | tuple[int, ...] | None = "Hello",
    messages: tuple[dict[str, Any], ...] | None = None,
    tools: tuple[dict[str, Any], ...] = (),
    template_kwargs: dict[str, Any] | None = None,
    model: str | None = None,
    tenant: str = "acme",
    request_id: str = "r-1",
    **sampling: Any,
) -> PreparedRequest:
    """Send a request through the wire format into an intake."""
    message = RequestMessage(
        request_id=request_id,
        tenant=tenant,
        sampling=SamplingParams(**{"seed": 7, **sampling}),
        prompt=None if messages else prompt,
        messages=messages,
        model=model,
        tools=tools,
        chat_template_kwargs=template_kwargs or {},
    )
    return intake.prepare(
        encode_request(message), tenant=tenant, request_id=request_id, emitted=emitted
    )


def refused(intake: Intake = INTAKE, **request: Any) -> RequestError:
    """Return the answer to a request that must be refused."""
    with pytest.raises(RequestError) as caught:
        prepare(intake, **request)
    return caught.value


def emitted_bytes(data: bytes) -> tuple[ChunkMessage, ...]:
    """Return a token log of one byte a token, in two chunks."""
    ids = byte_ids(TOKENIZER, data)
    parts = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    return tuple(ChunkMessage(tuple(part), ("",) * len(part)) for part in parts)
