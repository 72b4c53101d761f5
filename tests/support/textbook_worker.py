"""The red control: a worker by the textbook, XREADGROUP, XAUTOCLAIM, XADD and XACK.

Run as ``python tests/support/textbook_worker.py URL QUEUE NAME IDLE_MS``. It serves the same
requests with the same tokens and writes the same chunks, without offsets, epochs or ends that count
once. It is correct as long as nothing goes wrong, and the stream checker must see when it is not.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import redis

from headrace.keys import GROUP, Keys
from headrace.protocol import (
    CHUNK_FIELD,
    TERMINAL_FIELD,
    ChunkMessage,
    TerminalMessage,
    decode_request,
    encode_chunk,
    encode_terminal,
)
from headrace.types import FinishReason
from support.fake_engine import fake_token

LANE = 5
STEP_S = 0.01
BATCH = 8


def main(url: str, queue: str, name: str, idle_ms: str) -> None:
    """Serve until killed."""
    client, keys = redis.Redis.from_url(url), Keys(queue)
    while True:
        lane = keys.lane(LANE, "acme")
        read: Any = client.xreadgroup(GROUP, name, {lane: ">"}, count=BATCH, block=50)
        entries = [entry for _, entries in read or () for entry in entries]
        taken: Any = client.xautoclaim(lane, GROUP, name, int(idle_ms), count=BATCH)
        serve(client, keys, lane, entries + taken[1])


def serve(client: redis.Redis, keys: Keys, lane: str, entries: list[Any]) -> None:
    """Answer a batch, one token a step for each."""
    running = [(entry_id, decode_request(fields[b"payload"])) for entry_id, fields in entries]
    outputs: list[list[int]] = [[] for _ in running]
    while running:
        time.sleep(STEP_S)
        for (entry_id, message), output in list(zip(running, outputs, strict=True)):
            log = keys.token_log(message.tenant, message.request_id)
            prompt, sampling = message.prompt, message.sampling
            assert isinstance(prompt, tuple)
            output.append(fake_token(sampling.seed or 0, (*prompt, *output)))
            client.xadd(log, {CHUNK_FIELD: encode_chunk(ChunkMessage((output[-1],), ("",)))})
            if len(output) == sampling.max_tokens:
                end = encode_terminal(TerminalMessage(FinishReason.LENGTH))
                client.xadd(log, {TERMINAL_FIELD: end})
                client.xack(lane, GROUP, entry_id)
        left = [i for i, (_, m) in enumerate(running) if len(outputs[i]) != m.sampling.max_tokens]
        running, outputs = [running[i] for i in left], [outputs[i] for i in left]


if __name__ == "__main__":
    main(*sys.argv[1:])
