"""A producer that uses all its rights against the queue: random writes, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack
import redis

from headrace.errors import TransportError
from headrace.protocol import RequestMessage, encode_request
from headrace.sampling import SamplingParams
from support.queue_driver import QueueDriver

NAME = "mallory"
IDS = [f"m{number}" for number in range(6)]
LAST_ID = f"{2**64 - 1}-{2**64 - 1}"
VALUES: list[Any] = [
    *("", "x", "-1", "0", "1", "3", "007", "1.5", "9" * 14, "9" * 16, "1e300", "nan", "inf"),
    *(b"\xff\xfe", "_requeued", "_suspects", "w1", "queued", "running", "finished", "1-1"),
    *("99999999999999-0", LAST_ID, msgpack.packb([[1] * 7] * 3), msgpack.packb([1] * 5)),
]
FIELDS = [
    "state",
    "payload",
    "digest",
    "cost",
    "lane",
    "entry",
    "attached",
    "epoch",
    "num_tokens",
    "owner",
    "granted_tokens",
    "strikes",
    "deaths",
    "evidence",
    "alone",
    "cancel",
    "finish",
    "enqueued_ms",
    "started_ms",
    "finished_ms",
    "deadline_ms",
    "result_ttl_ms",
    "finish_reason",
    "error_code",
    "error_message",
    "closed_by",
]
COUNTS = [
    f"{what}{where}"
    for what in ("queued", "running", "turn", "since")
    for where in ("", ":0", ":5", ":9", ":5:acme", ":0:mallory", ":5:ghost", ":9:a:b")
]
CURSORS = ["bytes", "sweep_cursor", "janitor_cursor", "repair_cursor", "books_cursor"]
MEMBERS = ["acme", NAME, "ghost", "", b"\xff", "a:b"]


class HostileProducer:
    """Attacks with the rights of one tenant; what Redis refuses is not an error."""

    def __init__(self, own: QueueDriver, seed: int) -> None:
        self._own = own
        self._redis: Any = own.client
        self._keys = own.keys
        self._draw = random.Random(seed)
        self._attacks: list[Callable[[], object]] = [
            *(self._enqueue, self._ask, self._spoil_request, self._spoil_request),
            *(self._spoil_lane, self._move_lease, self._spoil_log, self._spoil_counts),
            *(self._spoil_turns, self._spoil_times, self._delete, self._change_kind, self._wake),
        ]

    def attack(self) -> None:
        """Do one thing that a client would not do."""
        with suppress(redis.RedisError, TransportError, TypeError, UnicodeError, ValueError):
            self._draw.choice(self._attacks)()

    def _of(self, *choices: Any) -> Any:
        return self._draw.choice(choices)

    def _lane(self) -> str:
        return self._keys.lane(self._of(0, 5, 9), NAME)

    def _request(self) -> str:
        return self._keys.request(NAME, self._of(*IDS, "\xff", "a b"))

    def _log(self) -> str:
        return self._keys.token_log(NAME, self._of(*IDS))

    def _entries(self) -> list[bytes]:
        read = self._redis.xread({self._lane(): "0"}, count=5)
        return [entry_id for _, entries in read for entry_id, _ in entries]

    def _enqueue(self) -> None:
        name, options = self._of(*IDS), {"ttl_ms": self._of(None, 1, 50, 60_000)}
        sampling = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
        message = RequestMessage(name, NAME, sampling, prompt=(5, 6, 7), model="fake")
        options |= {"priority": self._of(0, 5, 9), "cost": self._of(1, 10, 5000)}
        self._own.enqueue(name, NAME, payload=self._of(encode_request(message), b"x"), **options)

    def _ask(self) -> None:
        ask = self._of(self._own.cancel, self._own.finish_now)
        ask(self._of(*IDS), NAME)
        self._own.reprioritise(self._of(0, 5, 9), self._of(*IDS), NAME)

    def _spoil_request(self) -> None:
        fields = {self._of(*FIELDS): self._of(*VALUES) for _ in range(self._of(1, 1, 6))}
        self._redis.hset(self._request(), mapping=fields)

    def _spoil_lane(self) -> None:
        entry = {self._of("r", "z"): self._of(*IDS, *VALUES), "c": 1, "b": self._of(*VALUES)}
        self._redis.xadd(self._lane(), entry)
        self._redis.xack(self._lane(), "workers", *self._entries())
        self._redis.xdel(self._lane(), *self._entries()[:1])

    def _move_lease(self) -> None:
        holder = self._of("_requeued", "_suspects", "w1", "zz", "")
        options = {"force": True, "justid": True, "idle": self._of(0, 10**6)}
        self._redis.xclaim(self._lane(), "workers", holder, 0, self._entries(), **options)

    def _spoil_log(self) -> None:
        entry = {self._of("c", "e", "z"): self._of(*VALUES)}
        self._redis.xadd(self._log(), entry, id=self._of("1-0", "5-1", "99999999-0", LAST_ID))

    def _spoil_counts(self) -> None:
        field = self._of(*COUNTS, *CURSORS)
        self._redis.hset(self._keys.stats, field, self._of(*VALUES))
        self._redis.hincrby(self._keys.stats, self._of(*COUNTS), self._of(-5, 5, 10**15))
        self._redis.hdel(self._keys.stats, self._of(*COUNTS))

    def _spoil_turns(self) -> None:
        served = self._keys.served(self._of(0, 5, 9))
        self._redis.zadd(served, {self._of(*MEMBERS): self._of("inf", "-inf", 0, -1e300)})
        self._redis.zrem(served, self._of(*MEMBERS))

    def _spoil_times(self) -> None:
        name = self._of(f"{NAME}:{self._of(*IDS)}", "acme:r1", "none", "a:b:c", b"\xff:\xff", "")
        times = self._of(self._keys.deadlines, self._keys.promotions)
        self._redis.zadd(times, {name: self._of(0, -1, 1e15, "inf", "-inf")})

    def _delete(self) -> None:
        key = self._of(self._request(), self._lane(), self._log())
        self._of(self._redis.delete, lambda one: self._redis.pexpire(one, 1))(key)

    def _change_kind(self) -> None:
        self._redis.hset(self._of(self._lane(), self._log()), "a", "b")
        self._redis.xadd(self._request(), {"a": "b"})

    def _wake(self) -> None:
        self._redis.xadd(self._keys.wake, {"w": 1}, id=self._of("*", LAST_ID))
        self._redis.publish(self._keys.control, self._of("x", "acme:r1", b"\xff"))
