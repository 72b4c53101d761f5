"""The stand of a chaos run: a server, workers, clients in a thread of their own, and proxies."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from headrace import AsyncClient
from headrace.keys import Keys
from support.chaos_clients import PATIENT, Clients
from support.chaos_history import History
from support.chaos_result import Result, Size
from support.queue_driver import TENANT, QueueDriver
from support.servers import Server, running_server
from support.streams import Asked
from support.tcp_proxy import TcpProxy
from support.waiting import PATIENCE_S, eventually
from support.workers import SHORT_LEASE_S, WorkerFarm, WorkerProcess, worker_farm

T = TypeVar("T")

DRAIN_S = 900.0  # the longest that a backlog may take; what hangs is a problem, not a wait for ever
QUIET = {"HEADRACE_LOG_LEVEL": "info"}  # a line a step would be the load
RANDOM_KILLS = ("--max-strikes", "1000")  # many kills may hit one innocent; dead letters are apart
SEATS = ("--max-num-seqs", "16")  # two of three workers have room for what clients ask at a time


class Stand:
    """One queue under fault; ``open_stand`` makes it, and leaves nothing behind."""

    def __init__(self, folder: Path, server: Server, farm: WorkerFarm, result: Result) -> None:
        self.folder = folder
        self.server = server
        self.farm = farm
        self.result = result
        self.size: Size = result.size
        self.draw = random.Random(result.seed)  # of the nemesis
        self.keys = Keys("chaos")
        self.driver = QueueDriver(server.connect(), self.keys)  # the queue from outside
        self.history = History(folder / "history.jsonl")
        self.tally = folder / "tally"
        self.workers: list[WorkerProcess] = []  # those that should be alive
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._open = AsyncExitStack()
        self.clients = self.call(self._connect(server.url))

    def start_worker(
        self,
        *flags: str,
        step_s: float = 0.01,
        num_blocks: int = 2048,
        lease_s: float = SHORT_LEASE_S,
        **options: Any,
    ) -> WorkerProcess:
        """Start a worker that counts its tokens, and return when it claims."""
        flags = ("--lease-ttl", f"{lease_s}s", *flags)
        options_of_engine = {"step-s": step_s, "num-blocks": num_blocks, "tally": self.tally}
        engine = [
            word for name, value in options_of_engine.items() for word in (f"--{name}", str(value))
        ]
        options["env"] = {**QUIET, **options.get("env", {})}
        worker = self.farm.ready(*RANDOM_KILLS, *SEATS, *flags, engine=engine, **options)
        self.workers.append(worker)
        return worker

    def in_loop(self, do: Callable[[], object]) -> None:
        """Do something, for example to a proxy's connections, where they are served."""
        self._loop.call_soon_threadsafe(do)

    def make_requests(self, number: int | None = None, prefix: str = "r") -> list[Asked]:
        """Draw requests of very different lengths, each with a seed of its own."""
        return [
            Asked(
                f"{prefix}{index}",
                prompt=tuple(self.draw.randrange(3, 256) for _ in range(self.draw.choice((1, 9)))),
                max_tokens=min(400, 2 + int(self.draw.expovariate(1 / self.size.tokens))),
                seed=self.draw.getrandbits(62),
            )
            for index in range(self.size.requests if number is None else number)
        ]

    @contextmanager
    def load(
        self,
        asked: Sequence[Asked],
        *,
        in_flight: int = 32,
        is_read: bool = True,
        clients: Clients | None = None,
    ) -> Iterator[Future[None]]:
        """Run the clients while the nemesis works inside; leaving waits for the last answer."""
        future = self.begin((clients or self.clients).run(asked, in_flight, is_read=is_read))
        try:
            yield future
            self.until(future.done, timeout_s=DRAIN_S)
            future.result()
        finally:
            future.cancel()

    def new_clients(self, url: str | None = None, **options: Any) -> Clients:
        """Return more clients, of another address or tenant."""
        return self.call(self._connect(url or self.server.url, **options))

    def proxy(self) -> TcpProxy:
        """Put a proxy before the server; its methods belong into ``in_loop``."""
        return self.call(self._open.enter_async_context(TcpProxy(self.server.socket_path)))

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start something on the clients' loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = DRAIN_S) -> T:
        """Run something on the clients' loop, to its end."""
        return self.begin(coroutine).result(timeout_s)

    def until(self, condition: Callable[[], object], timeout_s: float = 120.0) -> None:
        """Wait for something; raises AssertionError when it takes too long or no worker is left."""

        def holds() -> bool:
            if condition():
                return True
            if self.workers and all(worker.child.poll() is not None for worker in self.workers):
                raise AssertionError(f"no worker is left:\n{self.workers[-1].output[-2000:]}")
            return False

        eventually(holds, timeout_s=timeout_s)

    def wait_for_tokens(self, number: int) -> None:
        """Return when calm readers have seen so many."""
        self.until(lambda: self.clients.num_tokens >= number)

    def wait_for_s(self, seconds: float) -> None:
        """Let a fault last."""
        until_s = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= until_s, timeout_s=seconds + PATIENCE_S)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of a name in the logs of all workers ever started."""
        return [event for worker in self.farm.workers for event in worker.events(name)]

    def close(self) -> None:
        """Stop clients and proxies."""
        self.call(self._open.aclose(), timeout_s=PATIENCE_S)
        self.driver.client.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=PATIENCE_S)
        self._loop.close()
        self.history.close()

    async def _connect(self, url: str, **options: Any) -> Clients:
        options = {"queue": self.keys.queue, "tenant": TENANT, "timeout": PATIENT, **options}
        client = await self._open.enter_async_context(AsyncClient(url, **options))
        return Clients(client, self.history, self.draw.getrandbits(32))


@contextmanager
def open_stand(folder: Path, kind: str, options: dict[str, str], result: Result) -> Iterator[Stand]:
    """Give a stand whose server, workers and clients are all gone afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    with running_server(kind, options) as server, worker_farm(folder, server.url, "chaos") as farm:
        result.server = f"{kind} {version_of(server)}"
        stand = Stand(folder, server, farm, result)
        try:
            yield stand
        finally:
            stand.close()


def version_of(server: Server) -> str:
    """Return the version that a server tells."""
    with server.connect() as client:
        info: Any = client.info("server")
    return str(info.get("valkey_version", info["redis_version"]))
