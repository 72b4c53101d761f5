"""The rights that docs/protocol.md names for each kind of user are enough, and keep others out."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import redis
from redis import Redis

from headrace import Client, TransportError
from headrace.functions import library_code, load_library_sync
from headrace.keys import Keys
from headrace.testing import FakeWorker
from support.client_fixtures import QUICK
from support.repository import ROOT
from support.servers import Server

AddUser = Callable[[str], str]


@pytest.fixture
def add_user(client: Redis, server: Server, queue: Keys) -> AddUser:
    """Give a maker of users with the documented rights; returns the URL to connect with."""
    load_library_sync(client)
    text = (ROOT / "docs" / "protocol.md").read_text("utf-8")

    def add(kind: str) -> str:
        found = re.search(rf"^ACL SETUSER {kind} (.*)$", text, re.MULTILINE)
        assert found is not None, f"docs/protocol.md does not say what a {kind} may do"
        rules = found[1].replace("{q}", queue.base).replace(">password", ">secret")
        client.execute_command("ACL", "SETUSER", kind, "reset", *rules.split())
        return server.url.replace("unix://", f"unix://{kind}:secret@")

    return add


def test_producer_and_worker_get_by_with_their_rights(add_user: AddUser, queue: Keys) -> None:
    """A request is queued, streamed, cancelled, asked after and answered."""
    with (
        FakeWorker(add_user("worker"), queue=queue.queue),
        Client(add_user("producer"), queue=queue.queue, timeout=QUICK) as producer,
    ):
        assert producer.generate("Hi", ttl=60.0).text == "Hi"
        with producer.stream("ab") as stream:
            assert [chunk.text for chunk in stream] == ["a", "b"]
    with Client(add_user("producer"), queue=queue.queue, timeout=QUICK) as producer:
        producer.submit("nobody answers this", request_id="r1")
        assert producer.cancel("r1").is_terminal
        assert producer.status("r1").state.is_terminal


def test_a_reader_reads_and_no_more(
    add_user: AddUser, queue: Keys, redis_url: str, fake_worker: FakeWorker
) -> None:
    """It attaches and asks; submitting and cancelling are refused."""
    with Client(redis_url, queue=queue.queue, timeout=QUICK) as producer:
        assert producer.generate("Hi", request_id="r1").text == "Hi"
    with Client(add_user("reader"), queue=queue.queue, timeout=QUICK) as reader:
        with reader.attach("r1") as stream:
            assert stream.read().text == "Hi"
        with pytest.raises(TransportError, match="permission"):
            reader.submit("no")
        with pytest.raises(TransportError, match="permission"):
            reader.cancel("r1")


@pytest.mark.parametrize("kind", ["producer", "worker", "reader"])
def test_other_keys_are_out_of_reach(add_user: AddUser, client: Redis, kind: str) -> None:
    """A user of one queue can neither read nor write another one."""
    client.set("{other}:stats", "x", ex=60)
    with redis.from_url(add_user(kind)) as user, pytest.raises(redis.ResponseError):
        user.execute_command("XREAD", "STREAMS", "{other}:stats", "0")


def test_a_worker_may_call_every_command_of_the_library(add_user: AddUser, client: Redis) -> None:
    """No function fails half way for want of a right."""
    add_user("worker")
    commands = {
        (name, sub if name in ("XGROUP", "XINFO") else None)
        for name, sub in re.findall(r"redis\.p?call\('(\w+)'(?:, '(\w+)')?", library_code())
    }
    for name, sub in sorted(commands, key=str):
        allowed = _dry_run(client, [name, *([sub] if sub else [])])
        assert allowed == "OK", f"{name} {sub}: {allowed}"


def _dry_run(client: Redis, words: list[str]) -> str:
    """Return what Redis thinks of the command, with as many arguments as it wants."""
    for number in range(7):
        try:
            answer = client.execute_command(
                "ACL", "DRYRUN", "worker", *words, *["{x}:stats"] * number
            )
        except redis.ResponseError:  # too few
            continue
        text = answer.decode() if isinstance(answer, bytes) else str(answer)
        return "OK" if "to access" in text else text  # other keys are another test's business
    raise AssertionError(f"{words} never has enough arguments")
