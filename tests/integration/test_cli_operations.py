"""The commands for operators: the queue's state, dead letters and the doctor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis.asyncio

from headrace.cli import supervisor
from headrace.cli.doctor import look_at_server
from headrace.functions import heartbeat
from headrace.keys import Keys
from headrace.testing import FakeWorker
from support.command_fixtures import Headrace
from support.queue_driver import QueueDriver
from support.waiting import eventually

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)


def test_status_shows_the_queue_and_its_workers(headrace: Headrace, driver: QueueDriver) -> None:
    """Depth by tenant and the workers' heartbeats are shown, as text and as JSON."""
    assert "no worker serves" in headrace("status").err
    headrace("enqueue", "Hello", "--request-id", "r1")
    info = {"model": "m", "running": 3}
    driver.run(heartbeat(driver.keys, worker_id="w1", info=info, ttl_ms=60_000))
    shown = headrace("status").out
    assert "queued 1 · running 0" in shown
    assert "default\t1\t0" in shown
    assert "model=m running=3" in shown
    values = json.loads(headrace("status", "--json").out)
    assert (values["queued"], values["workers"][0]["facts"]["model"]) == (1, "m")
    headrace("cancel", "r1")


def test_a_worker_without_a_heartbeat_is_not_shown(headrace: Headrace, driver: QueueDriver) -> None:
    """A name whose heartbeat has run out, or that only claimed yet, is no worker."""
    driver.claim("w1")
    assert json.loads(headrace("status", "--json").out)["workers"] == []


def test_dead_letters_are_listed_replayed_and_purged(
    headrace: Headrace, driver: QueueDriver, redis_url: str, queue: Keys
) -> None:
    """A request that took down its worker can be looked at, tried again, and deleted."""
    for request_id in ("bad-1", "bad-2", "bad-3"):
        headrace("enqueue", "Hello", "--request-id", request_id)
        take_down(driver, request_id)
    letters = [json.loads(line) for line in headrace("dlq", "list", "--json").out.splitlines()]
    assert [letter["request_id"] for letter in letters] == ["bad-1", "bad-2", "bad-3"]
    assert [death["epoch"] for death in letters[0]["evidence"]] == [1, 2, 3]
    table = headrace("dlq", "list").out
    assert "bad-1" in table
    assert "victim-of-bad-1 epoch 3 alone, tokens 0 to 0: killed by signal 9" in table
    assert headrace("dlq", "replay", letters[0]["entry_id"]).code == 0
    with FakeWorker(redis_url, queue=queue.queue):
        assert headrace("attach", "bad-1").out == "Hello\n"
    assert headrace("dlq", "purge", letters[1]["entry_id"]).code == 0
    assert headrace("dlq", "purge", "1-1").code == 1
    assert headrace("dlq", "replay", "1-1").code == 1
    assert "1 deleted" in headrace("dlq", "purge", "--all").err
    assert headrace("dlq", "list", "--json").out == ""


def take_down(driver: QueueDriver, request_id: str) -> None:
    """Let workers die of a request, alone, until it is a dead letter."""

    def is_dead() -> bool:
        for grant in driver.claim(f"victim-of-{request_id}").grants:
            driver.die(grant, worker_id=f"victim-of-{request_id}")
        status = driver.status(request_id, tenant="default")
        return status.state.is_terminal

    eventually(is_dead)


def test_doctor_names_what_is_wrong_and_how_to_mend_it(
    headrace: Headrace, driver: QueueDriver
) -> None:
    """A server that may evict or forget fails the check, line by line."""
    driver.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        ended = headrace("doctor", "--model", "nothing")
    finally:
        driver.client.config_set("maxmemory-policy", "noeviction")
    assert ended.code == 1
    assert "BAD  eviction     maxmemory-policy allkeys-lru" in ended.out
    assert "mend: CONFIG SET maxmemory-policy noeviction" in ended.out
    assert "BAD  persistence" in ended.out
    assert "ok   functions" in ended.out
    assert "BAD  model        unknown model 'nothing'" in ended.out


@pytest.mark.parametrize(("command", "name"), [("info", "server"), ("time", "workers")])
async def test_doctor_tells_a_refusal_from_an_absence(
    redis_url: str, driver: QueueDriver, command: str, name: str
) -> None:
    """A user without a command is told which, and everything else is still looked at."""
    rights = ("on", "nopass", "~*", "&*", "+@all", f"-{command}")
    driver.client.execute_command("ACL", "SETUSER", "limited", *rights)
    client = redis.asyncio.Redis.from_url(redis_url, username="limited", password="any")
    async with client:
        findings = {f.name: f for f in await look_at_server(client, driver.keys)}
    assert findings["functions"].ok
    assert findings[name].ok is False
    assert command.upper() in findings[name].mend


def test_doctor_goes_on_without_a_server_and_without_a_worker(
    headrace: Headrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server is a finding like any other; a host without the worker extra is nothing wrong."""
    monkeypatch.setattr(supervisor, "NEEDED_MODULES", ("torch", "no_such_module"))
    ended = headrace("doctor", "--redis-url", f"unix://{tmp_path}/none.sock")
    assert ended.code == 1
    assert "BAD  server       unreachable" in ended.out
    assert "note worker       the worker is not installed (no_such_module missing)" in ended.out
