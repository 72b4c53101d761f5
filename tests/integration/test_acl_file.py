"""The way of docs/security.md, from the command to a server that lets in whom it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from headrace import Client, TransportError
from headrace.functions import enqueue, load_library_sync, run_sync
from headrace.keys import Keys
from headrace.packing import MAX_PAYLOAD_BYTES
from support.client_fixtures import QUICK
from support.command_fixtures import Headrace
from support.queue_driver import TENANT, QueueDriver
from support.repository import ROOT
from support.servers import KINDS, Server, running_server
from support.streams import Asked, check_stream, wait_for_ends
from support.streams import enqueue as ask
from support.worker_fixtures import ON_VALKEY
from support.workers import worker_farm

PASSWORD = "acl-file-secret-4711"
QUEUE = "chat"
DEFAULT = "user default on nopass resetkeys resetchannels -@all +ping"

Login = Callable[[str], str]


@pytest.fixture
def acl_file(
    headrace: Headrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, str]:
    """Give a file of users as the command makes it."""
    monkeypatch.setenv("HEADRACE_ACL_PASSWORD", PASSWORD)
    lines = [DEFAULT]
    for words in (["worker"], ["operator"], ["producer", "--tenant", TENANT]):
        done = headrace("acl", *words, "--queue", QUEUE)
        assert (done.code, done.err) == (0, "")
        lines.append(done.out.strip())
    path = tmp_path / "users.acl"
    path.write_text("\n".join(lines) + "\n")
    return path, "\n".join(lines)


@pytest.fixture(params=KINDS)
def guarded(request: pytest.FixtureRequest, acl_file: tuple[Path, str]) -> Iterator[Server]:
    """Give a server with these users, and the options of compose.yaml."""
    command = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["queue"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    told = {"proto-max-bulk-len": options["--proto-max-bulk-len"], "aclfile": str(acl_file[0])}
    with running_server(request.param, told, tcp=True) as server:
        yield server


@pytest.fixture
def login(guarded: Server) -> Login:
    """Give a maker of URLs for the users."""
    return lambda name: f"redis://{QUEUE}-{name}:{PASSWORD}@127.0.0.1:{guarded.port}/0"


@ON_VALKEY
def test_the_printed_users_can_work_and_nobody_else_can(login: Login, tmp_path: Path) -> None:
    """Worker, operator and producer do their part; whoever has no login may only ping."""
    asked = Asked("r1")
    with worker_farm(tmp_path, login("worker"), QUEUE) as farm:
        worker = farm.ready()
        with redis.from_url(login("operator")) as operator:
            load_library_sync(operator)
            driver = QueueDriver(operator, Keys(QUEUE))
            with redis.from_url(login(f"producer-{TENANT}")) as producer:
                ask(QueueDriver(producer, Keys(QUEUE)), asked)
            wait_for_ends(driver, asked)
            check_stream(driver, asked)
        assert PASSWORD not in worker.output
    anonymous = login("worker").replace(f"{QUEUE}-worker:{PASSWORD}@", "")
    with Client(anonymous, queue=QUEUE, timeout=QUICK) as client:
        with pytest.raises(TransportError, match="permission"):
            client.submit("Hi")
    with redis.from_url(anonymous) as connection:
        assert connection.ping()


@ON_VALKEY
def test_a_producer_that_comes_before_everybody_else_is_told(login: Login) -> None:
    """It may not load the functions, and no waiting mends that."""
    url = login(f"producer-{TENANT}")
    with Client(url, queue=QUEUE, tenant=TENANT, timeout=QUICK) as client:
        with pytest.raises(TransportError, match="permission") as caught:
            client.submit("Hi")
    assert not caught.value.retryable_later


@ON_VALKEY
def test_a_value_that_is_too_large_ends_the_connection(login: Login) -> None:
    """The greatest payload is taken; one beyond proto-max-bulk-len never reaches memory."""
    with redis.from_url(login("operator")) as operator:
        load_library_sync(operator)
        settings: dict[str, Any] = {"tenant": "t", "cost": 1, "priority": 0, "result_ttl_ms": 1000}
        whole = bytes(MAX_PAYLOAD_BYTES)
        run_sync(operator, enqueue(Keys(QUEUE), request_id="r1", payload=whole, **settings))
        with pytest.raises(TransportError):
            run_sync(operator, enqueue(Keys(QUEUE), request_id="r2", payload=whole * 5, **settings))


@ON_VALKEY
def test_the_file_holds_no_password(acl_file: tuple[Path, str]) -> None:
    """Only its hash is printed."""
    assert PASSWORD not in acl_file[1]
    assert "user chat-producer-acme on #" in acl_file[1]


@ON_VALKEY
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["worker", "--tenant", "acme"], "a worker serves all tenants"),
        (["producer", "--tenant", "a*"], "tenant 'a*'"),
        (["reader", "--user", "two words"], "'two words' must not hold a space"),
        (["reader", "--acl-password", ""], "HEADRACE_ACL_PASSWORD is needed"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    headrace: Headrace, monkeypatch: pytest.MonkeyPatch, words: list[str], why: str
) -> None:
    """Nothing is printed that somebody could paste."""
    monkeypatch.setenv("HEADRACE_ACL_PASSWORD", PASSWORD)
    done = headrace("acl", *words)
    assert done.code != 0
    assert done.out == ""
    assert why in " ".join(done.err.split())
