"""The rights of each kind of user are enough for its work, and keep it out of everything else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis import Redis

from headrace import AsyncClient, Client, TransportError
from headrace.errors import ConfigurationError, InvalidRequest
from headrace.functions import library_code, list_dead, run_sync
from headrace.keys import Keys
from headrace.rights import Role, acl_rules
from headrace.testing import FakeWorker
from support.acl_users import AclUsers, acl_users
from support.client_fixtures import QUICK
from support.servers import Server

TENANTS = [None, "acme"]


@pytest.fixture
def users(client: Redis, server: Server, queue: Keys) -> Iterator[AclUsers]:
    """Give a maker of users."""
    with acl_users(client, server, queue) as users:
        yield users


@pytest.mark.parametrize("tenant", TENANTS)
async def test_a_producer_gets_by_with_its_rights(
    users: AclUsers, queue: Keys, tenant: str | None
) -> None:
    """Queued, streamed, cancelled, moved, asked after: over all tenants and within one."""
    settings = {"queue": queue.queue, "tenant": tenant or "any", "timeout": QUICK}
    url = users.add(Role.PRODUCER, tenant)
    async with AsyncClient(url, **settings) as producer:  # type: ignore[arg-type]
        with FakeWorker(users.add(Role.WORKER), queue=queue.queue):
            assert (await producer.generate("Hi", ttl=60.0)).text == "Hi"
            async with producer.stream("ab") as stream:
                assert [chunk.text async for chunk in stream] == ["a", "b"]
        await producer.submit("nobody answers this", request_id="r1", ttl=60.0)
        assert await producer.reprioritise("r1", 2) == "queued"
        assert (await producer.cancel("r1")).is_terminal
        await producer.submit("nor this", request_id="r2")
        assert (await producer.finish_now("r2")).is_terminal
        assert (await producer.status("r1")).state.is_terminal


@pytest.mark.parametrize("tenant", TENANTS)
def test_a_reader_reads_and_no_more(
    users: AclUsers, queue: Keys, redis_url: str, fake_worker: FakeWorker, tenant: str | None
) -> None:
    """It attaches and asks; submitting and cancelling are refused."""
    with Client(redis_url, queue=queue.queue, tenant="acme", timeout=QUICK) as producer:
        assert producer.generate("Hi", request_id="r1").text == "Hi"
    url = users.add(Role.READER, tenant)
    with Client(url, queue=queue.queue, tenant="acme", timeout=QUICK) as reader:
        with reader.attach("r1") as stream:
            assert stream.read().text == "Hi"
        refused: list[Callable[[], Any]] = [
            lambda: reader.submit("no"),
            lambda: reader.cancel("r1"),
        ]
        for attempt in refused:
            with pytest.raises(TransportError, match="permission"):
                attempt()


def test_a_reader_of_one_tenant_sees_no_other(
    users: AclUsers, queue: Keys, redis_url: str, fake_worker: FakeWorker
) -> None:
    """Neither the answer nor whether there is such a request."""
    with Client(redis_url, queue=queue.queue, tenant="acme", timeout=QUICK) as producer:
        producer.generate("Hi", request_id="r1")
    url = users.add(Role.READER, "other")
    with Client(url, queue=queue.queue, tenant="acme", timeout=QUICK) as reader:
        with pytest.raises(TransportError, match=r"permission|can't access"):
            reader.status("r1")
        with pytest.raises(TransportError, match=r"permission|can't access"):
            reader.attach("r1").__enter__()


@pytest.mark.parametrize("role", Role)
def test_other_queues_are_out_of_reach(users: AclUsers, client: Redis, role: Role) -> None:
    """A user of one queue can neither read nor write another one."""
    client.set("{other}:stats", "x", ex=60)
    with redis.from_url(users.add(role)) as user:
        for attempt in (["XREAD", "STREAMS", "{other}:out:a:b", "0"], ["DEL", "{other}:stats"]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.execute_command(*attempt)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    "attempt",
    ["FLUSHALL", "KEYS *", "CONFIG SET maxmemory 1", "CLIENT PAUSE 9 ALL",
     "CLIENT KILL TYPE normal", "SHUTDOWN", "ACL LIST", "EVAL return 0",
     "MONITOR", "REPLICAOF a 1"],
)  # fmt: skip
def test_no_role_may_harm_the_server(users: AclUsers, role: Role, attempt: str) -> None:
    """What would stop it, empty it or change it is refused to all four."""
    with redis.from_url(users.add(role)) as user:
        with pytest.raises(redis.exceptions.NoPermissionError):
            user.execute_command(*attempt.split())


def test_an_operator_sees_dead_letters_and_who_is_connected(users: AclUsers, queue: Keys) -> None:
    """What the dlq, status and doctor commands ask."""
    with redis.from_url(users.add(Role.OPERATOR)) as operator:
        assert run_sync(operator, list_dead(queue)) == ()
        assert operator.client_list()
        assert operator.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert operator.acl_whoami().endswith("operator-all")


@pytest.mark.parametrize("role", [Role.WORKER, Role.OPERATOR])
def test_serving_roles_may_call_every_command_of_the_library(
    users: AclUsers, client: Redis, role: Role
) -> None:
    """No function fails half way for want of a right."""
    users.add(role)
    commands = {
        (name, sub if name in ("XGROUP", "XINFO") else None)
        for name, sub in re.findall(r"redis\.p?call\('(\w+)'(?:, '(\w+)')?", library_code())
    }
    for name, sub in sorted(commands, key=str):
        allowed = _dry_run(client, users.names[0], [name, *([sub] if sub else [])])
        assert allowed == "OK", f"{name} {sub}: {allowed}"


def test_wrong_rights_are_refused_by_name() -> None:
    """A worker of one tenant does not exist, nor does a tenant with a pattern for a name."""
    with pytest.raises(ConfigurationError, match="a worker serves all tenants"):
        acl_rules(Role.WORKER, Keys("q"), "acme")
    with pytest.raises(InvalidRequest, match=r"tenant '\*'"):
        acl_rules(Role.PRODUCER, Keys("q"), "*")


def _dry_run(client: Redis, user: str, words: list[str]) -> str:
    """Return what Redis thinks of the command, with as many arguments as it wants."""
    execute: Any = client.execute_command
    for number in range(7):
        try:
            answer = execute("ACL", "DRYRUN", user, *words, *["{x}:stats"] * number)
        except redis.ResponseError:  # too few
            continue
        text = answer.decode() if isinstance(answer, bytes) else str(answer)
        return "OK" if "to access" in text else text  # other keys are another test's business
    raise AssertionError(f"{words} never has enough arguments")
