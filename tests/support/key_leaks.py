"""Finding keys that would stay in Redis for ever."""

from __future__ import annotations

import redis

from headrace.keys import PERMANENT

LIVE_STATES = (b"queued", b"running")


def find_leaks(client: redis.Redis) -> list[str]:
    """Return the keys that have no TTL, are not permanent, and belong to no unfinished request."""
    return [key.decode() for key in client.scan_iter(count=1000) if _is_leak(client, key)]


def _is_leak(client: redis.Redis, key: bytes) -> bool:
    if client.pttl(key) != -1:  # it has a TTL, or has just expired
        return False
    base, _, name = key.decode().partition(":")
    kind, _, request = name.partition(":")
    if kind in ("req", "out"):
        return client.hget(f"{base}:req:{request}", "state") not in LIVE_STATES
    return kind not in PERMANENT
