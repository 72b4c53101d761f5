"""Many token logs over few connections: each reader task blocks in one XREAD over its share.

All of it runs on one event loop. A reader owns its connection and its set of inboxes; a stream
owns its inbox, and is told by an event. What a reader does to an inbox is feed it, disturb it
(the connection was lost: ask for the status), or fail it; nothing here ever ends a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import redis.asyncio
from redis import exceptions

from headrace.assembly import LogAssembly, StreamAssembly
from headrace.connections import BLOCK_MARGIN_S, BLOCK_S, COMMAND_TIMEOUT_S
from headrace.errors import HeadraceError, ProtocolError, TransportError
from headrace.functions import is_passing
from headrace.patience import delays_s
from headrace.reading import Entries, is_refusal, read_logs

LOGS_PER_READER = 96
"""A reader takes this many logs before another one is started."""

FULL_INBOX = 256
"""Chunks in an inbox above which its logs are no longer read; they wait in Redis."""

SHORT_BLOCK_S = 0.05
"""Length of a blocking read where Redis refuses CLIENT UNBLOCK; a new log waits so long at most."""

NUDGE_GAP_S = 0.005
"""Pause between two tries to end a blocking read."""


class Inbox:
    """What arrived for one stream and was not taken yet."""

    def __init__(self, assembly: StreamAssembly) -> None:
        self.assembly = assembly
        self.is_disturbed = False  # set by a reader after an outage, cleared by the stream
        self.failure: HeadraceError | None = None  # why nothing more will come
        self._news = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """Whether the stream has enough to do."""
        return self.assembly.num_ready >= FULL_INBOX

    async def wait(self, timeout_s: float) -> None:
        """Return when something happened, or after the time; now and then for nothing."""
        loop = asyncio.get_running_loop()
        at_s = loop.time() + timeout_s
        # Each chunk moves the time out. The alarm that is set stays, and at worst rings too soon:
        # a timer a chunk cost more than to read the chunk.
        if self._alarm is None or self._alarm.when() > at_s:
            self._drop_alarm()
            self._alarm = loop.call_at(at_s, self._ring)
        await self._news.wait()
        self._news.clear()

    def close(self) -> None:
        """Leave no timer behind; whoever still waits looks around, and may set another."""
        self._drop_alarm()
        self._news.set()

    def feed(self, log: LogAssembly, entries: Entries) -> None:
        """Take entries of one log; an unreadable one fails this stream alone."""
        try:
            self.assembly.feed(log, entries)
        except ProtocolError as error:
            self.failure = error
        self._news.set()

    def disturb(self) -> None:
        """Make the stream ask what has become of its request."""
        self.is_disturbed = True
        self._news.set()

    def fail(self, error: HeadraceError) -> None:
        """Tell the stream that nothing more will come."""
        self.failure = error
        self._news.set()

    def _drop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _ring(self) -> None:
        self._alarm = None
        self._news.set()


class Multiplexer:
    """Spreads inboxes over readers, and starts as many readers as are needed and allowed."""

    def __init__(
        self,
        unblock: Callable[[int], Awaitable[None]],
        connect: Callable[[], redis.asyncio.Redis],
        max_readers: int,
    ) -> None:
        self._unblock = unblock
        self._connect = connect
        self._max_readers = max_readers
        self._readers: list[_Reader] = []
        self._reader_of: dict[Inbox, _Reader] = {}

    def add(self, inbox: Inbox) -> None:
        """Start to read the logs of an inbox."""
        reader = min(self._readers, key=lambda reader: reader.num_logs, default=None)
        has_room = reader is not None and reader.num_logs < LOGS_PER_READER
        if reader is None or (not has_room and len(self._readers) < self._max_readers):
            reader = _Reader(self._unblock, self._connect())
            self._readers.append(reader)
        self._reader_of[inbox] = reader
        reader.add(inbox)

    def resume(self, inbox: Inbox) -> None:
        """Note that an inbox has room again."""
        if (reader := self._reader_of.get(inbox)) is not None:
            reader.nudge()

    def remove(self, inbox: Inbox) -> None:
        """Read the logs of an inbox no longer; safe to call twice."""
        inbox.close()
        if (reader := self._reader_of.pop(inbox, None)) is not None:
            reader.remove(inbox)

    async def aclose(self) -> None:
        """Stop all readers; streams that still wait get a TransportError."""
        for inbox in list(self._reader_of):
            self.remove(inbox)
            inbox.fail(TransportError("the client is closed"))
        await asyncio.gather(*(reader.aclose() for reader in self._readers))
        self._readers.clear()


class _Reader:
    """One task, one connection, one blocking read at a time."""

    def __init__(
        self, unblock: Callable[[int], Awaitable[None]], connection: redis.asyncio.Redis
    ) -> None:
        self._unblock = unblock  # ends the blocking read of a connection, by its id
        self._connection = connection
        self._connection_id: int | None = None  # as Redis counts; unknown while not connected
        self._inboxes: dict[Inbox, None] = {}  # an ordered set
        self.num_logs = 0  # of all inboxes
        self._block_s = BLOCK_S
        self._is_blocked = False  # in a blocking read right now
        self._has_news = asyncio.Event()  # the set of logs is not the one being read
        self._nudge: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._run(), name="headrace-reader")

    def add(self, inbox: Inbox) -> None:
        self._inboxes[inbox] = None
        self.num_logs += len(inbox.assembly.logs)
        self.nudge()

    def remove(self, inbox: Inbox) -> None:
        del self._inboxes[inbox]
        self.num_logs -= len(inbox.assembly.logs)

    def nudge(self) -> None:
        """Have the next read begin now, over the present set of logs."""
        self._has_news.set()
        if self._is_blocked and (self._nudge is None or self._nudge.done()):
            self._nudge = asyncio.create_task(self._end_read(), name="headrace-nudge")

    async def aclose(self) -> None:
        tasks = [self._task, *([self._nudge] if self._nudge else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._connection.aclose()

    async def _run(self) -> None:
        delays = delays_s()
        was_lost = False
        while True:
            try:
                await self._read_once()
            # The transport loop: redis-py also raises TypeError and the like when a connection
            # breaks at the wrong moment, and a reader that dies would leave its streams hanging.
            except Exception as error:
                was_lost = True
                self._connection_id = None
                if is_refusal(error):
                    await self._fail_refused()
                await asyncio.sleep(next(delays))
                continue
            if was_lost:
                was_lost, delays = False, delays_s()
                for inbox in self._inboxes:
                    inbox.disturb()

    async def _read_once(self) -> None:
        if self._inboxes and self._connection_id is None:
            await self._introduce()
        self._has_news.clear()
        wanted = self._wanted()  # from here to the read nothing else runs, so no news is missed
        if not wanted:
            await self._has_news.wait()
            return
        for log, entries in await self._read(wanted):
            wanted[log].feed(log, entries)

    async def _introduce(self) -> None:
        """Learn the connection's id, and whether Redis will let it be unblocked."""
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            connection_id = await self._connection.client_id()
        try:
            await self._unblock(connection_id)  # it is not blocked: only the permission is asked
            self._block_s = BLOCK_S
        except exceptions.ResponseError as error:
            if is_passing(error):
                raise
            self._block_s = SHORT_BLOCK_S
        self._connection_id = connection_id

    def _wanted(self) -> dict[LogAssembly, Inbox]:
        return {
            log: inbox
            for inbox in self._inboxes
            if not inbox.is_full and inbox.failure is None
            for log in inbox.assembly.unfinished
        }

    async def _read(self, logs: Iterable[LogAssembly]) -> list[tuple[LogAssembly, Entries]]:
        self._is_blocked = True
        try:
            async with asyncio.timeout(self._block_s + BLOCK_MARGIN_S):
                return await read_logs(self._connection, logs, self._block_s)
        finally:
            self._is_blocked = False

    async def _end_read(self) -> None:
        """End the blocking read that still has an old set of logs.

        The read may not have reached Redis yet, so this asks again until the read has returned.
        """
        while self._is_blocked and self._has_news.is_set() and self._connection_id is not None:
            try:
                await self._unblock(self._connection_id)
            except (TransportError, exceptions.RedisError, OSError):
                return  # the read fails as well, and begins anew
            await asyncio.sleep(NUDGE_GAP_S)

    async def _fail_refused(self) -> None:
        """Give up where trying again cannot help: wrong password, no permission, wrong type.

        One bad log fails the read of all, so each stream is read by itself.
        """
        for inbox in [inbox for inbox in self._inboxes if inbox.failure is None]:
            if not (logs := inbox.assembly.unfinished):
                continue
            try:
                async with asyncio.timeout(COMMAND_TIMEOUT_S):
                    found = await read_logs(self._connection, logs, None)
            except Exception as error:  # as in the loop, which calls this
                if not is_refusal(error):
                    return
                failure = TransportError(f"Redis refuses to be read: {error}")
                failure.__cause__ = error
                inbox.fail(failure)
            else:
                for log, entries in found:
                    inbox.feed(log, entries)
