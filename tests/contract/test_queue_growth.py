"""What a call costs Redis does not grow with the queue: it runs the same few commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from headrace import functions
from headrace.functions import Call, T
from headrace.keys import Keys
from support.queue_driver import QueueDriver, chunk_of
from support.servers import Server

MANY = 20_000
MOST_COMMANDS = 40  # of a call about one request
MOST_FOR_A_BITE = 4000  # of a call about as many as it will look at: 64 to 100
ROOM = {"free_seqs": 1000, "free_tokens": 10**6, "total_tokens": 10**6}


@dataclass(slots=True)
class Meter:
    """Runs calls one by one and counts the commands that the server runs for each."""

    driver: QueueDriver

    def cost(self, do: Callable[[], object]) -> int:
        """Return the number of commands, whoever ran them."""
        client = self.driver.client
        client.config_resetstat()
        do()
        stats = client.info("commandstats")
        own = ("cmdstat_config", "cmdstat_info", "cmdstat_fcall", "cmdstat_fcall_ro")
        return sum(one["calls"] for name, one in stats.items() if not name.startswith(own))


def _send_all(driver: QueueDriver, calls: Iterator[Call[T]]) -> None:
    pipeline = driver.client.pipeline(transaction=False)
    for call in calls:
        name = f"{functions.LIBRARY}_{call.function}"
        pipeline.execute_command("FCALL", name, 1, call.key, *call.args)
    pipeline.execute()


def tenant_of(number: int) -> str:
    """Return a thousand tenants in all, of whom the first has half of the requests."""
    return f"t{number % 1000}" if number % 2 else "t0"


def _enqueues(keys: Keys) -> Iterator[Call[functions.EnqueueReply]]:
    for number in range(MANY):
        yield functions.enqueue(
            keys,
            tenant=tenant_of(number),
            request_id=f"r{number}",
            payload=b"x",
            cost=10,
            priority=5,
            result_ttl_ms=60_000,
            ttl_ms=3_600_000,
        )


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_a_call_is_a_bounded_piece_of_work(server: Server, queue: Keys) -> None:
    """With 20,000 requests queued, half of one tenant and the others of hundreds, as with one."""
    with server.connect() as client:
        driver = QueueDriver(client, queue)
        functions.load_library_sync(client)
        _send_all(driver, _enqueues(queue))
        assert driver.depth().queued == MANY
        _check_calls(driver, Meter(driver).cost)
        client.flushall()


def _check_calls(driver: QueueDriver, cost: Callable[[Callable[[], object]], int]) -> None:
    single = {
        "enqueue": cost(lambda: driver.enqueue("new", tenant="t0", ttl_ms=60_000)),
        "cancel": cost(lambda: driver.cancel("r101", tenant=tenant_of(101))),
        "reprioritise": cost(lambda: driver.reprioritise(7, "r103", tenant=tenant_of(103))),
        "depth": cost(driver.depth),
    }
    grants = driver.claim("w2", **ROOM).grants
    assert len(grants) == 64
    single["emit"] = cost(lambda: driver.emit(grants[0], worker_id="w2"))
    single["finish"] = cost(lambda: driver.finish(grants[0], 1, worker_id="w2"))
    assert {name: most for name, most in single.items() if most > MOST_COMMANDS} == {}
    bites = {
        "claim": cost(lambda: driver.claim("w3", **ROOM)),
        "emit": cost(lambda: driver.emit_all([chunk_of(g, 0, 1) for g in grants[1:]], "w2")),
        "renew": cost(lambda: driver.renew(*grants[1:], worker_id="w2")),
        "reap": cost(lambda: driver.reap_after(1)),
        "janitor": cost(lambda: driver.janitor(count=100)),
    }
    assert {name: most for name, most in bites.items() if most > MOST_FOR_A_BITE} == {}
