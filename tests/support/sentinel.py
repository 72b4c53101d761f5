"""A master, two replicas and three Sentinels: real processes on loopback, gone afterwards."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import redis

from support.servers import Server, binary_of, free_port, running_server
from support.waiting import eventually

SERVICE = "mymaster"
NUM_REPLICAS = 2
NUM_SENTINELS = 3
QUORUM = 2
DOWN_AFTER_MS = 3000  # a busy machine must not fail over by itself
PASSWORD = "sentinel-secret-4711"
OPTIONS = {
    "appendonly": "yes",
    "min-replicas-to-write": "1",
    "repl-diskless-sync-delay": "0",
    "repl-ping-replica-period": "1",
}


@dataclass(slots=True)
class Replicated:
    """Servers, and who watches them."""

    servers: tuple[Server, ...]  # the first is the master in the beginning
    ports: tuple[int, ...]  # of the Sentinels

    @property
    def url(self) -> str:
        """Where a client finds the master, whichever it is."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        return f"redis+sentinel://{hosts}/{SERVICE}/0?sentinel_password={PASSWORD}"

    def sentinel(self, index: int) -> redis.Redis:
        """Return a connection to a Sentinel."""
        return redis.Redis(port=self.ports[index], password=PASSWORD)

    def master_port(self, index: int = 0) -> int:
        """Return who the master is, if one asks this Sentinel."""
        with self.sentinel(index) as client:
            return int(client.sentinel_master(SERVICE)["port"])

    def wait_for_failover(self, old: Server) -> Server:
        """Return the new master, once all Sentinels know it and it takes writes."""
        for index in range(NUM_SENTINELS):
            eventually(lambda i=index: self.master_port(i) != old.port)  # type: ignore[misc]
        new = next(server for server in self.servers if server.port == self.master_port())
        with new.connect() as client:
            eventually(lambda: client.info("replication")["role"] == "master")
        return new

    def wait_until_settled(self) -> None:
        """Return when the replicas follow, and each Sentinel knows them and the others."""
        with self.servers[0].connect() as client:
            eventually(lambda: _num_online(client) == NUM_REPLICAS)
        for index in range(NUM_SENTINELS):
            eventually(lambda i=index: self._is_informed(i))  # type: ignore[misc]

    def _is_informed(self, index: int) -> bool:
        with self.sentinel(index) as client:
            master = client.sentinel_master(SERVICE)
        others = (int(master["num-slaves"]), int(master["num-other-sentinels"]))
        return others == (NUM_REPLICAS, NUM_SENTINELS - 1)


@contextlib.contextmanager
def replicated(kind: str) -> Iterator[Replicated]:
    """Run all six; the master writes only where a replica follows it."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-sentinel-"))
    children: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(_end_all, children)
        master = stack.enter_context(running_server(kind, OPTIONS, tcp=True))
        follow = {**OPTIONS, "replicaof": f"127.0.0.1 {master.port}"}
        replicas = [
            stack.enter_context(running_server(kind, follow, tcp=True)) for _ in range(NUM_REPLICAS)
        ]
        ports = tuple(free_port() for _ in range(NUM_SENTINELS))
        children += [_start_sentinel(kind, folder, port, master.port) for port in ports]
        watched = Replicated((master, *replicas), ports)
        watched.wait_until_settled()
        yield watched


def _end_all(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.kill()
        child.wait()


def _num_online(client: redis.Redis) -> int:
    info = client.info("replication")
    return sum(info.get(f"slave{n}", {}).get("state") == "online" for n in range(NUM_REPLICAS))


def _start_sentinel(
    kind: str, folder: Path, port: int, master_port: int
) -> subprocess.Popen[bytes]:
    own = folder / str(port)
    own.mkdir()
    config = own / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {own}\nrequirepass {PASSWORD}\n"
        f"sentinel sentinel-pass {PASSWORD}\n"
        f"sentinel monitor {SERVICE} 127.0.0.1 {master_port} {QUORUM}\n"
        f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
        f"sentinel failover-timeout {SERVICE} 5000\n"
    )
    binary = binary_of(kind)
    assert binary is not None, f"{kind} is not installed"
    with (own / "log").open("wb") as log:
        child = subprocess.Popen([binary, str(config), "--sentinel"], stdout=log, stderr=log)
    with redis.Redis(port=port, password=PASSWORD) as client:
        eventually(lambda: _answers(client))
    return child


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
