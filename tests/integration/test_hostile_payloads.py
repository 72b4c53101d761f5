"""Hostile bytes meet a real worker: each is answered with a reason, and memory stays bounded."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis.asyncio.connection

from headrace.errors import ErrorCode, ProtocolError, TransportError
from headrace.functions import Grant
from headrace.keys import Keys
from headrace.packing import MAX_PAYLOAD_BYTES, MAX_PROMPT_TOKENS, pack
from headrace.protocol import CHUNK_FIELD
from headrace_worker.transport import queue as transport_queue
from headrace_worker.transport.connection import Connections
from support.queue_driver import TENANT, QueueDriver
from support.streams import Asked, check_stream, enqueue, wait_for_ends
from support.worker_fixtures import ON_VALKEY, queue_over
from support.workers import WorkerFarm, WorkerProcess

MIB = 1024 * 1024
CLAIM_REPLY_BYTES = 8 * MIB  # payloads in one reply, as claim.lua bounds them
ROUNDS = 4  # of all hostile payloads; what leaks would add up


def _array(length: int, body: bytes) -> bytes:
    return b"\xdd" + struct.pack(">I", length) + body


def _request(**fields: Any) -> bytes:
    return pack({"v": 1, "t": TENANT, "p": [5, 6], **fields})


EMPTY_MAPS = _array(MAX_PROMPT_TOKENS, b"\x80" * MAX_PROMPT_TOKENS)
BYTES = {
    "nothing": b"",
    "one-byte": b"\xc1",
    "garbage": b"\xc1" * MAX_PAYLOAD_BYTES,
    "too-big": bytes(MAX_PAYLOAD_BYTES + 1),
    "far-too-big": bytes(16 * MIB),
    "bomb": _array(7, EMPTY_MAPS * 7),  # 1.8 MiB on the wire, 117 MiB if it were decoded
    "claims-4-GiB": b"\xdd\xff\xff\xff\xff\x00",
    "extension": msgpack.packb(msgpack.ExtType(5, b"rm -rf")),
    "timestamp": msgpack.packb(msgpack.Timestamp(1, 0)),
    "deep": b"\x91" * 100_000 + b"\x90",
}


def _nan(request_id: str) -> bytes:
    return _request(id=request_id, s={"temperature": float("nan")})


@ON_VALKEY
def test_bombs_are_answered_and_cost_the_worker_little(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """Each ends with a reason, the worker lives on, its peak of memory is small (queue B47)."""
    worker = farm.ready()
    enqueue(driver, first := Asked("first", max_tokens=200))
    wait_for_ends(driver, first)
    before = _peak_bytes(worker)
    for number in range(ROUNDS):
        ids = [f"{name}-{number}" for name in BYTES]
        for request_id, payload in zip(ids, BYTES.values(), strict=True):
            driver.enqueue(request_id, payload=payload)
        driver.enqueue(f"nan-{number}", payload=_nan(f"nan-{number}"))
        wait_for_ends(driver, *(Asked(request_id) for request_id in [*ids, f"nan-{number}"]))
        assert {driver.end(i).error_code for i in ids} == {ErrorCode.UNDECODABLE}
        nan = driver.end(f"nan-{number}")
        assert nan.error_code is ErrorCode.INVALID_REQUEST
        assert "temperature" in nan.error_message
    grown = _peak_bytes(worker) - before
    enqueue(driver, last := Asked("last"))
    wait_for_ends(driver, last)
    check_stream(driver, last)
    assert worker.child.poll() is None
    assert grown < 2 * CLAIM_REPLY_BYTES, f"{grown / MIB:.1f} MiB"


@ON_VALKEY
@pytest.mark.parametrize("entry", [{"x": b"1"}, {CHUNK_FIELD: b"\xc1"}])
def test_a_spoiled_log_is_the_end_of_its_request_alone(
    driver: QueueDriver, farm: WorkerFarm, entry: dict[str, bytes]
) -> None:
    """A producer may write into its own logs; a worker gives a reason and goes on."""
    enqueue(driver, spoiled := Asked("spoiled"), good := Asked("good"))
    driver.client.xadd(driver.keys.token_log(TENANT, "spoiled"), entry, id="1-0")  # type: ignore[arg-type]
    driver.client.hset(driver.keys.request(TENANT, "spoiled"), "num_tokens", 1)
    worker = farm.ready()
    wait_for_ends(driver, spoiled, good)
    assert driver.end("spoiled").error_code is not None
    check_stream(driver, good)
    assert worker.child.poll() is None


async def test_a_log_is_read_in_pages_and_to_a_limit(
    driver: QueueDriver, connections: Connections, queue: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All chunks of a long log arrive, in order; one that is too large is no log of ours."""
    driver.enqueue("long")
    grant = driver.grant("w1")
    for offset in range(0, 600):
        driver.emit(grant, offset)
    remote = queue_over(connections, queue)
    chunks = await remote.read_token_log(grant)
    assert [chunk.token_ids for chunk in chunks] == [(offset,) for offset in range(600)]
    monkeypatch.setattr(transport_queue, "MAX_LOG_BYTES", 1000)
    with pytest.raises(ProtocolError, match="more than 1000 bytes"):
        await remote.read_token_log(grant)


@ON_VALKEY
async def test_a_bug_of_the_client_library_is_an_outage_not_the_end(
    driver: QueueDriver, connections: Connections, queue: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TypeError from a broken transport is a TransportError, and all goes on (queue B6)."""
    driver.enqueue("r1")
    remote = queue_over(connections, queue)
    grant: Grant = driver.grant("w1")
    kind = redis.asyncio.connection.AbstractConnection
    with monkeypatch.context() as broken:
        broken.setattr(kind, "send_packed_command", _raise_type_error)
        for attempt in (remote.depth(), remote.read_token_log(grant), _wait(remote)):
            with pytest.raises(TransportError, match="NoneType"):
                await attempt
    assert (await remote.depth()).running == 1
    assert await remote.read_token_log(grant) == ()


@ON_VALKEY
def test_nobody_asks_which_version_the_server_has(driver: QueueDriver, farm: WorkerFarm) -> None:
    """A server that lies about its version changes nothing (queue B48)."""
    driver.client.config_resetstat()
    farm.ready()
    enqueue(driver, asked := Asked("r1"))
    wait_for_ends(driver, asked)
    stats = driver.client.info("commandstats")
    used = {name.removeprefix("cmdstat_") for name in stats if stats[name]["calls"]}
    assert "fcall" in used
    assert used.isdisjoint({"lolwut", "command", "module", "xackdel", "xdelex"})
    assert stats.get("cmdstat_info", {"calls": 1})["calls"] <= 1  # this test's own


def _raise_type_error(*_args: object, **_options: object) -> None:
    raise TypeError("'NoneType' object is not callable")


async def _wait(remote: transport_queue.RedisQueue) -> None:
    await remote.wait_for_work("0-0", 0.1)


def _peak_bytes(worker: WorkerProcess) -> int:
    """Return the most memory that the process has had so far."""
    lines = Path(f"/proc/{worker.child.pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024
