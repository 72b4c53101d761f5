"""Every Redis key name, and nowhere else.

All keys of a queue share one hash tag, so a queue lives in one shard of a cluster and one function
call may touch all of them. ``lua/library.lua`` builds the same names; a test holds the two in step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.checks import shown
from headrace.errors import ConfigurationError, InvalidRequest

GROUP = "workers"
"""Consumer group on every lane."""

LANES = 10
"""Number of priorities: 0 soonest … 9."""

PERMANENT = frozenset(
    {"in", "served", "stats", "deadlines", "promotions", "workers", "wake", "dead"}
)
"""Kinds of keys, the word behind the hash tag, that live without a TTL.

``in`` and ``served`` go away with a tenant's last request, ``wake`` holds one entry, ``dead`` is
trimmed, and the others hold what there is work for. Besides these, the hash and the token log of a
request have no TTL until it ends.
"""

MAX_NAME_LENGTH = 64
MAX_REQUEST_ID_LENGTH = 160

_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_NAME_LENGTH}}}")
_REQUEST_ID = re.compile(rf"[A-Za-z0-9._:@/+=-]{{1,{MAX_REQUEST_ID_LENGTH}}}")


@dataclass(frozen=True, slots=True)
class Keys:
    """The key names of one queue."""

    queue: str  # [A-Za-z0-9._-], at most 64 characters

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.queue):
            raise ConfigurationError(f"queue name {self.queue!r} does not match {_NAME.pattern}")

    @property
    def base(self) -> str:
        """Hash tag that all keys of the queue begin with; the KEYS[1] of every function."""
        return f"{{{self.queue}}}"

    def lane(self, lane: int, tenant: str) -> str:
        """Stream: one entry per queued request of a tenant at a priority."""
        return f"{self.base}:in:{lane}:{tenant}"

    def request(self, tenant: str, request_id: str) -> str:
        """Hash: state, payload, epoch, offset, owner, strikes of one request."""
        return f"{self.base}:req:{tenant}:{request_id}"

    def token_log(self, tenant: str, request_id: str) -> str:
        """Stream: the chunks of one request, ``<end offset>-0``, and its end, ``<n>-1``."""
        return f"{self.base}:out:{tenant}:{request_id}"

    def served(self, lane: int) -> str:
        """Sorted set: tenants with work in a lane, scored by tokens served."""
        return f"{self.base}:served:{lane}"

    @property
    def stats(self) -> str:
        """Hash: true counts of the queue, turns of the lanes, cursors of reaper and janitor."""
        return f"{self.base}:stats"

    def worker(self, worker_id: str) -> str:
        """Hash with TTL: heartbeat, lease, last claim's nonce and grants."""
        return f"{self.base}:worker:{worker_id}"

    @property
    def workers(self) -> str:
        """Sorted set: worker ids by last heartbeat, in milliseconds of Redis's clock."""
        return f"{self.base}:workers"

    @property
    def deadlines(self) -> str:
        """Sorted set: ``<tenant>:<request id>`` of unfinished requests by deadline, Unix ms."""
        return f"{self.base}:deadlines"

    @property
    def promotions(self) -> str:
        """Sorted set: the same names by when they move to a sooner lane, Unix ms."""
        return f"{self.base}:promotions"

    @property
    def sweep(self) -> str:
        """String with TTL: the worker that reaps now."""
        return f"{self.base}:sweep"

    @property
    def isolator(self) -> str:
        """String with TTL: the worker that runs empty for suspects."""
        return f"{self.base}:isolator"

    @property
    def wake(self) -> str:
        """Stream of one entry: what idle workers block on."""
        return f"{self.base}:wake"

    @property
    def control(self) -> str:
        """Channel of hints to workers: ``<tenant>:<request id>`` of a running request."""
        return f"{self.base}:ctl"

    @property
    def dead(self) -> str:
        """Stream: dead letters."""
        return f"{self.base}:dead"

    @property
    def dead_books(self) -> str:
        """Hash: bytes of all dead letters, and with whom the last one died."""
        return f"{self.base}:dead:books"


def check_tenant(tenant: str) -> str:
    """Return the tenant, or raise InvalidRequest that names it."""
    if not isinstance(tenant, str) or not _NAME.fullmatch(tenant):
        raise InvalidRequest(f"tenant {shown(tenant)} does not match {_NAME.pattern}")
    return tenant


def check_request_id(request_id: str) -> str:
    """Return the request id, or raise InvalidRequest that names it."""
    if not isinstance(request_id, str) or not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(f"request_id {shown(request_id)} does not match {_REQUEST_ID.pattern}")
    return request_id
