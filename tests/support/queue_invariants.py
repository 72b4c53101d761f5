"""What must be true of a queue after every function call, read from Redis itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import redis

from headrace.functions import depth, run_sync
from headrace.keys import GROUP, Keys
from headrace.protocol import CHUNK_FIELD, TERMINAL_FIELD, decode_chunk, decode_terminal

LIVE = ("queued", "running")


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request as its hash tells."""

    tenant: str
    request_id: str
    fields: dict[str, str]  # without what is msgpack
    payload_bytes: int


def check_queue(client: redis.Redis, keys: Keys) -> None:
    """Raise AssertionError when counts, lanes, hashes and token logs do not agree."""
    requests = list(stored_requests(client, keys))
    check_counts(client, keys, requests)
    check_lanes(client, keys, requests)
    for request in requests:
        check_log(client, keys, request)


def check_empty(client: redis.Redis, keys: Keys) -> None:
    """Raise AssertionError unless nothing but results and dead letters is left."""
    counts = run_sync(client, depth(keys))
    assert (counts.queued, counts.running, counts.payload_bytes) == (0, 0, 0)
    assert counts.by_tenant == {}
    kinds = {key.decode().split(":")[1] for key in client.scan_iter(f"{keys.base}:*", count=1000)}
    assert not kinds & {"in", "served", "deadlines", "promotions"}, f"work has left {kinds}"


def stored_requests(client: redis.Redis, keys: Keys) -> list[StoredRequest]:
    """Read all request hashes."""
    return [_read(client, key) for key in client.scan_iter(f"{keys.base}:req:*", count=1000)]


def check_counts(client: redis.Redis, keys: Keys, requests: list[StoredRequest]) -> None:
    """Compare depth with the hashes."""
    counts = run_sync(client, depth(keys))
    states = Counter(request.fields["state"] for request in requests)
    assert (counts.queued, counts.running) == (states["queued"], states["running"])
    live = [request for request in requests if request.fields["state"] in LIVE]
    assert counts.payload_bytes == sum(request.payload_bytes for request in live)
    tenants = Counter((request.tenant, request.fields["state"]) for request in live)
    told = {
        (tenant, state): number
        for tenant, work in counts.by_tenant.items()
        for state, number in (("queued", work.queued), ("running", work.running))
        if number
    }
    assert told == dict(tenants)


def check_lanes(client: redis.Redis, keys: Keys, requests: list[StoredRequest]) -> None:
    """Compare lanes and their pending entries with the hashes: one entry for each live request."""
    expected: dict[str, dict[str, str | None]] = {}
    for request in requests:
        if request.fields["state"] in LIVE:
            lane = keys.lane(int(request.fields["lane"]), request.tenant)
            expected.setdefault(lane, {})[request.fields["entry"]] = request.fields.get("owner")
    found = {
        key.decode(): _holders(client, key.decode())
        for key in client.scan_iter(f"{keys.base}:in:*", count=1000)
    }
    assert found == expected


def check_log(client: redis.Redis, keys: Keys, request: StoredRequest) -> None:
    """Offsets are dense, tokens are those of their offsets, and one end comes when it is due."""
    entries: Any = client.xrange(keys.token_log(request.tenant, request.request_id))
    tokens: list[int] = []
    ends = 0
    for entry_id, fields in entries:
        if CHUNK_FIELD in fields:
            assert ends == 0, f"{request.request_id} goes on after its end"
            tokens += decode_chunk(fields[CHUNK_FIELD]).token_ids
            assert entry_id.decode() == f"{len(tokens)}-0"
        else:
            decode_terminal(fields[TERMINAL_FIELD])
            ends += 1
            assert entry_id.decode() == f"{len(tokens)}-1"
    assert tokens == list(range(int(request.fields["num_tokens"])))
    assert ends == (0 if request.fields["state"] in LIVE else 1)


def _read(client: redis.Redis, key: bytes) -> StoredRequest:
    _, _, tenant, request_id = key.decode().split(":", 3)
    raw: Any = client.hgetall(key)
    payload = raw.pop(b"payload", b"")
    raw.pop(b"evidence", None)  # msgpack, too
    fields = {name.decode(): value.decode() for name, value in raw.items()}
    return StoredRequest(tenant, request_id, fields, len(payload))


def _holders(client: redis.Redis, lane: str) -> dict[str, str | None]:
    """Return the holder of each entry of a lane; None for those that wait."""
    entries: Any = client.xrange(lane)
    holders: dict[str, str | None] = {entry_id.decode(): None for entry_id, _ in entries}
    pending: Any = client.xpending_range(lane, GROUP, "-", "+", 10_000)
    for item in pending:
        consumer = item["consumer"].decode()
        holders[item["message_id"].decode()] = None if consumer.startswith("_") else consumer
    return holders
