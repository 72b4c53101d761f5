"""TLS and logins: both clients and the worker over rediss://, and no password in anything said."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import AsyncClient, Client, TransportError
from headrace.connections import ConnectionSettings
from headrace.errors import ConfigurationError
from headrace.keys import Keys
from support.certificates import Certificates, make_certificates
from support.client_fixtures import QUICK
from support.command_fixtures import Headrace
from support.queue_driver import TENANT, QueueDriver
from support.servers import free_port, running_server
from support.streams import Asked, check_stream, enqueue, wait_for_ends
from support.workers import WorkerFarm, worker_farm

PASSWORD = "open-sesame-4711"
QUEUE = "tls"


class Secured:
    """A server that speaks only TLS, wants a client certificate, and knows one user."""

    def __init__(self, port: int, certificates: Certificates, driver: QueueDriver) -> None:
        self.port = port
        self.certificates = certificates
        self.driver = driver

    def url(self, *, password: str = PASSWORD, host: str = "127.0.0.1", query: str = "") -> str:
        """Return an address, right in everything that is not said otherwise."""
        options = query or self.certificates.query()
        return f"rediss://someone:{password}@{host}:{self.port}/0?{options}"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Give files of an authority of the tests' own."""
    return make_certificates(tmp_path_factory.mktemp("tls") / "certificates")


@pytest.fixture(scope="module")
def secured(certificates: Certificates) -> Iterator[Secured]:
    """Give the server; from outside it is seen through its Unix socket."""
    port = free_port()
    with running_server("redis", certificates.server_options(port)) as server:
        with server.connect() as client:
            rules = ["reset", "on", f">{PASSWORD}", "~*", "&*", "+@all"]
            client.execute_command("ACL", "SETUSER", "someone", *rules)
            yield Secured(port, certificates, QueueDriver(client, Keys(QUEUE)))


@pytest.fixture
def farm(tmp_path: Path, secured: Secured) -> Iterator[WorkerFarm]:
    """Give a starter of workers of that server."""
    secured.driver.client.flushall()
    with worker_farm(tmp_path, secured.url(), QUEUE) as farm:
        yield farm


async def test_a_worker_and_both_clients_meet_over_tls(secured: Secured, farm: WorkerFarm) -> None:
    """A request goes the whole way, encrypted, with a login and certificates on both sides."""
    asked = Asked("r1", model="fake")
    farm.ready()
    enqueue(secured.driver, asked)
    async with AsyncClient(secured.url(), queue=QUEUE, tenant=TENANT, timeout=QUICK) as client:
        async with client.attach("r1") as stream:
            assert list((await stream.read()).token_ids) == asked.answer
    with Client(secured.url(), queue=QUEUE, tenant=TENANT, timeout=QUICK) as client:
        with client.attach("r1") as blocking:
            assert list(blocking.read().token_ids) == asked.answer
    check_stream(secured.driver, asked)


@pytest.mark.parametrize("wrong", ["login", "certificate"])
async def test_a_refused_client_says_so_at_once(secured: Secured, wrong: str) -> None:
    """A wrong password and a server that cannot be trusted are no outages to be waited for."""
    url = {
        "login": secured.url(password="wrong-horse"),
        "certificate": secured.url(query="ssl_check_hostname=true"),  # trusts the system's only
    }[wrong]
    match = {"login": "WRONGPASS|invalid username", "certificate": "certificate verify failed"}
    async with AsyncClient(url, queue=QUEUE, timeout=QUICK) as client:
        with pytest.raises(TransportError, match=match[wrong]) as caught:
            await client.submit("Hi")
    with Client(url, queue=QUEUE, timeout=QUICK) as blocking:
        with pytest.raises(TransportError, match=match[wrong]):
            blocking.submit("Hi")
    assert not caught.value.retryable_later
    assert "wrong-horse" not in str(caught.value)


def test_a_certificate_for_another_host_is_refused(secured: Secured) -> None:
    """Encryption to whoever answers would be worth little: the name is checked, too."""
    with Client(secured.url(host="localhost"), queue=QUEUE, timeout=QUICK) as client:
        with pytest.raises(TransportError, match="certificate is not valid for 'localhost'"):
            client.submit("Hi")


def test_a_worker_that_is_refused_stops_and_keeps_the_password_to_itself(
    secured: Secured, farm: WorkerFarm
) -> None:
    """At level debug, with the login wrong and with the server untrusted: exit 1, no password."""
    for url in (secured.url(password=f"{PASSWORD}-old"), secured.url(query="ssl_ca_certs=")):
        worker = farm.start(url=url.replace("?ssl_ca_certs=", ""))
        assert worker.wait() == 1
        assert "Redis " in worker.events("worker.stopped")[0]["reason"]
        assert PASSWORD not in worker.output


def test_a_working_worker_never_writes_its_password(secured: Secured, farm: WorkerFarm) -> None:
    """Start, an outage with errors, and the end, at level debug: the password is in no line."""
    asked = Asked("r2")
    worker = farm.ready()
    secured.driver.client.client_kill_filter(_type="normal", skipme=True)
    enqueue(secured.driver, asked)
    wait_for_ends(secured.driver, asked)
    worker.child.terminate()
    worker.wait()
    assert "someone" in worker.output  # whom it logs in as is told
    assert PASSWORD not in worker.output


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("command", [["status"], ["dlq", "list"], ["enqueue", "Hi"]])
def test_commands_never_print_the_password(headrace: Headrace, command: list[str]) -> None:
    """The login is wrong, or the URL is: the message does not hold the password."""
    right = os.environ["HEADRACE_REDIS_URL"].removeprefix("unix://")
    for url in (f"unix://someone:{PASSWORD}@{right}", f"redis://someone:{PASSWORD}@host:port/0"):
        done = headrace(*command, "--redis-url", url)
        assert done.code != 0
        assert done.err
        assert PASSWORD not in done.out + done.err


@pytest.mark.parametrize(
    "url",
    [
        f"redis://u:{PASSWORD}@host:port/0",
        f"redis://u:x/{PASSWORD}@host/0",
        f"redis://host/0?password={PASSWORD}&max_connections=many",
        f"redis+sentinel://u:{PASSWORD}@host:1:2/mymaster?sentinel_password={PASSWORD}",
        f"{PASSWORD}@host",
    ],
)
def test_a_bad_url_is_refused_without_its_password(url: str) -> None:
    """Neither the message nor what it was raised from holds the password."""
    with pytest.raises(ConfigurationError) as caught:
        ConnectionSettings(url, 2)
    assert PASSWORD not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_settings_do_not_show_the_password() -> None:
    """Whoever logs a client's settings logs no secret."""
    settings = ConnectionSettings(f"redis+sentinel://u:{PASSWORD}@host/mymaster", 2)
    assert PASSWORD not in repr(settings)
    assert PASSWORD not in repr(settings.address)


def test_a_missing_file_is_named(certificates: Certificates) -> None:
    """A certificate that is not there is found before any I/O."""
    url = f"rediss://host/0?ssl_ca_certs={certificates.folder}/none.crt"
    with pytest.raises(ConfigurationError, match=r"ssl_ca_certs .*none\.crt"):
        ConnectionSettings(url, 2)
