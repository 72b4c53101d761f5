"""The fault matrix: a closed table, one row a fault, with its sizes, short and full."""

from __future__ import annotations

from support.chaos_fault import Fault
from support.chaos_network_faults import lose_replies
from support.chaos_red import kill_textbook_workers
from support.chaos_redis_faults import (
    EVERY_SECOND,
    kill_redis,
)
from support.chaos_result import Size
from support.chaos_worker_faults import kill_workers

SLACK = 4.0  # a test run shares its machine with other tests

FAULTS = (
    Fault(
        "worker-kill",
        "SIGKILL of a worker at a random token",
        "0 lost, 0 wrong, gap p99 ≤ L + L/4 + 1 s, ≤ 8 tokens of a request made again",
        kill_workers,
        short=Size(60, rounds=2, tokens=40, slack=SLACK),
        full=Size(10_000, rounds=100),
    ),
    Fault(
        "red-control",
        "the same with a textbook XREADGROUP/XAUTOCLAIM/XADD worker",
        "the stream checker fails it",
        kill_textbook_workers,
        short=Size(40, rounds=2, tokens=40),
        full=Size(500, rounds=20),
    ),
    Fault(
        "redis-kill",
        "SIGKILL of Redis under load, AOF everysec",
        "0 of the acknowledged lost",
        kill_redis,
        short=Size(1500, rounds=2, slack=SLACK),
        full=Size(100_000, rounds=20),
        server=EVERY_SECOND,
    ),
    Fault(
        "lost-replies",
        "a proxy swallows the replies to enqueue, claim, emit, finish and renew",
        "0 lost, 0 wrong, 0 doubles",
        lose_replies,
        short=Size(40, rounds=5, slack=SLACK),
        full=Size(1_000, rounds=200),
    ),
)


def find(name: str) -> Fault:
    """Return the fault of a name; raises KeyError for one that the table does not have."""
    return {fault.name: fault for fault in FAULTS}[name]
