"""The readers of AsyncClient, looked at closely: bounds, pauses, and what breaks a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio
from redis import Redis

from headrace.assembly import LogAssembly, StreamAssembly
from headrace.connections import ConnectionSettings
from headrace.multiplexer import (
    FULL_INBOX,
    LOGS_PER_READER,
    Inbox,
    Multiplexer,
)
from headrace.protocol import CHUNK_FIELD, ChunkMessage, encode_chunk
from headrace.reading import ENTRIES_PER_READ
from support.servers import Server
from support.waiting import PATIENCE_S, eventually_async

MAX_READERS = 2


class Bench:
    """A multiplexer with its connections, and a way to write logs that it reads."""

    def __init__(self, url: str, outside: Redis) -> None:
        settings = ConnectionSettings(url, max_connections=4)
        self.commands = settings.commands()
        self.connections: list[redis.asyncio.Redis] = []
        self._settings = settings
        self._outside = outside
        self.multiplexer = Multiplexer(self._unblock, self._connect, MAX_READERS)

    def inbox(self, *log_keys: str) -> Inbox:
        """Return an inbox over these logs, which the multiplexer reads from now on."""
        logs = [LogAssembly(key, key, choice=i) for i, key in enumerate(log_keys)]
        inbox = Inbox(StreamAssembly("r1", logs))
        self.multiplexer.add(inbox)
        return inbox

    def write(self, log_key: str, start: int, end: int) -> None:
        """Append tokens [start, end) to a log, one an entry."""
        pipeline = self._outside.pipeline()
        for i in range(start, end):
            entry = encode_chunk(ChunkMessage((i,), ("x",)))
            pipeline.xadd(log_key, {CHUNK_FIELD: entry}, id=f"{i + 1}-0")
        pipeline.execute()

    async def aclose(self) -> None:
        """Close everything."""
        await self.multiplexer.aclose()
        await self.commands.aclose()

    def _connect(self) -> redis.asyncio.Redis:
        self.connections.append(self._settings.reader())
        return self.connections[-1]

    async def _unblock(self, connection_id: int) -> None:
        await self.commands.client_unblock(connection_id)


@pytest.fixture
def outside(server: Server) -> Iterator[Redis]:
    """Write to the server; what was written is gone afterwards."""
    with server.connect() as client:
        yield client
        client.flushall()


@pytest.fixture
async def bench(redis_url: str, outside: Redis) -> AsyncIterator[Bench]:
    """Give a multiplexer of two readers at most."""
    bench = Bench(redis_url, outside)
    yield bench
    await bench.aclose()


async def arrived(inbox: Inbox, num_chunks: int) -> None:
    """Wait until so many chunks wait in an inbox."""

    async def has() -> bool:
        return inbox.assembly.num_ready >= num_chunks

    await eventually_async(has)


async def test_chunks_go_to_their_own_inbox(bench: Bench) -> None:
    """Each inbox gets what its logs hold, and nothing else."""
    one, two = bench.inbox("log1"), bench.inbox("log2", "log3")
    bench.write("log1", 0, 3)
    bench.write("log3", 0, 1)
    await arrived(one, 3)
    await arrived(two, 1)
    chunk = two.assembly.take()
    assert chunk is not None
    assert chunk.choice == 1
    assert two.assembly.num_ready == 0


async def test_inbox_is_bounded(bench: Bench) -> None:
    """What a slow stream does not take stays in Redis: its inbox has a bound."""
    slow, quick = bench.inbox("slow"), bench.inbox("quick")
    bench.write("slow", 0, 3000)
    await arrived(slow, FULL_INBOX)
    for i in range(20):
        bench.write("quick", i, i + 1)
        await arrived(quick, i + 1)
    assert slow.assembly.num_ready < FULL_INBOX + ENTRIES_PER_READ


async def test_paused_inbox_goes_on_where_it_stopped(bench: Bench) -> None:
    """When a stream has caught up, its logs are read again, from the very next token."""
    inbox = bench.inbox("log")
    bench.write("log", 0, 1000)
    taken: list[int] = []
    while len(taken) < 1000:
        await arrived(inbox, 1)
        while (chunk := inbox.assembly.take()) is not None:
            taken += chunk.token_ids
        bench.multiplexer.resume(inbox)
    assert taken == list(range(1000))


async def test_readers_are_started_as_needed_and_no_more(bench: Bench) -> None:
    """A second reader begins when the first is full, a third never: the bound holds."""
    inboxes = [bench.inbox(f"log{i}") for i in range(LOGS_PER_READER)]
    assert len(bench.connections) == 1
    inboxes += [bench.inbox(f"more{i}") for i in range(3 * LOGS_PER_READER)]
    assert len(bench.connections) == MAX_READERS
    bench.write("log0", 0, 1)
    bench.write(f"more{3 * LOGS_PER_READER - 1}", 0, 1)
    await arrived(inboxes[0], 1)
    await arrived(inboxes[-1], 1)


async def test_removed_inbox_is_left_alone(bench: Bench) -> None:
    """Nothing is read for a stream that has left, and leaving twice does no harm."""
    gone, here = bench.inbox("gone"), bench.inbox("here")
    bench.multiplexer.remove(gone)
    bench.multiplexer.remove(gone)
    bench.multiplexer.resume(gone)
    bench.write("gone", 0, 1)
    bench.write("here", 0, 1)
    await arrived(here, 1)
    bench.write("here", 1, 2)
    await arrived(here, 2)
    assert gone.assembly.num_ready <= 1  # the read that was under way may have brought it


async def test_lost_connection_disturbs_every_inbox(bench: Bench, outside: Redis) -> None:
    """After an outage each stream is told to ask for its status, and chunks keep coming."""
    inboxes = [bench.inbox(f"log{i}") for i in range(3)]
    bench.write("log0", 0, 1)
    await arrived(inboxes[0], 1)
    outside.client_kill_filter(_type="normal", skipme=True)

    async def all_disturbed() -> bool:
        bench.write("log1", 0, 1) if not outside.exists("log1") else None
        return all(inbox.is_disturbed for inbox in inboxes)

    await eventually_async(all_disturbed)
    await arrived(inboxes[1], 1)


@pytest.mark.parametrize("error", [TypeError("'NoneType'"), AttributeError("writelines")])
async def test_bugs_of_the_connection_do_not_end_the_reader(
    error: Exception, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py raises TypeError and AttributeError for some broken connections; reading goes on."""
    inbox = bench.inbox("log")
    bench.write("log", 0, 1)
    await arrived(inbox, 1)
    (connection,) = bench.connections
    real, num_calls = connection.execute_command, 0

    async def broken(*args: object, **options: object) -> object:
        nonlocal num_calls
        num_calls += 1  # of calls, the first three of which fail
        if num_calls <= 3:
            raise error
        return await real(*args, **options)

    monkeypatch.setattr(connection, "execute_command", broken)
    bench.write("log", 1, 2)  # ends the read that is under way; the next ones break
    await arrived(inbox, 2)
    bench.write("log", 2, 3)
    await arrived(inbox, 3)
    assert num_calls > 3
    assert inbox.is_disturbed


async def test_unreadable_log_fails_its_own_stream(bench: Bench, outside: Redis) -> None:
    """Bad bytes in one log are the matter of its stream alone."""
    bad, good = bench.inbox("bad"), bench.inbox("good")
    outside.xadd("bad", {CHUNK_FIELD: b"\xc1"}, id="1-0")
    bench.write("good", 0, 1)
    await arrived(good, 1)

    async def has_failed() -> bool:
        return bad.failure is not None

    await eventually_async(has_failed)
    assert good.failure is None


async def test_wait_ends_with_news_or_with_the_time(bench: Bench) -> None:
    """Waiting for news returns when there is some, and when the time is over."""
    inbox = bench.inbox("log")
    await inbox.wait(0.01)
    assert inbox.assembly.num_ready == 0
    waiting = asyncio.create_task(inbox.wait(PATIENCE_S))
    bench.write("log", 0, 1)
    await waiting
    assert inbox.assembly.num_ready == 1


async def test_closing_fails_what_is_open(bench: Bench) -> None:
    """Streams that are open when the readers stop learn that nothing will come."""
    inbox = bench.inbox("log")
    await bench.multiplexer.aclose()
    await inbox.wait(0.0)
    assert "closed" in str(inbox.failure)
