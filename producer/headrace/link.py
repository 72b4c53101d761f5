"""The asyncio side of the wire: calls that outlive an outage, direct reads, and the readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import redis.asyncio

from headrace.assembly import LogAssembly
from headrace.calls import Call, cancel, status
from headrace.connections import COMMAND_TIMEOUT_S, ConnectionSettings
from headrace.errors import RequestError, RequestNotFound, TransportError
from headrace.functions import REDIS_FAILURES, run
from headrace.groups import member_id
from headrace.keys import Keys
from headrace.multiplexer import Multiplexer
from headrace.patience import delays_s
from headrace.reading import Entries, is_refusal, read_logs
from headrace.sampling import MAX_N
from headrace.submission import Submission, refusal
from headrace.types import RequestState, RequestStatus

T = TypeVar("T")

QUIET_CANCEL_S = 2.0
"""How long a reader that leaves early tries to cancel its request."""


class AsyncLink:
    """One queue as seen through one set of connections."""

    def __init__(self, settings: ConnectionSettings, keys: Keys, retry_s: float | None) -> None:
        self.keys = keys
        self._retry_s = retry_s  # how long to go on while Redis is away; None: for ever
        self._redis: redis.asyncio.Redis = settings.commands()
        self._free = asyncio.Semaphore(settings.num_commands)  # connections
        self._waiting: set[asyncio.Timeout] = set()  # of the calls that wait for a connection
        self.multiplexer = Multiplexer(self._unblock, settings.reader, settings.num_readers)
        self._is_closed = False

    async def call(self, call: Call[T]) -> T:
        """Call a function, again and again while Redis is away; raises TransportError.

        Every function is idempotent, so a call whose reply was lost may simply be made again.
        """
        loop = asyncio.get_running_loop()
        give_up_s = None if self._retry_s is None else loop.time() + self._retry_s
        for delay_s in delays_s():
            try:
                return await self.call_once(call)
            except TransportError as error:
                is_late = give_up_s is not None and loop.time() + delay_s >= give_up_s
                if is_late or not error.retryable_later:
                    raise
            await asyncio.sleep(delay_s)
        raise AssertionError("delays never end")

    async def call_once(self, call: Call[T]) -> T:
        """Call a function without another try; raises TransportError."""
        return await self._in_time(lambda: run(self._redis, call))

    async def enqueue(self, submission: Submission, *, withdraw: bool) -> bool:
        """Send all parts; return whether any had ended before; raises RequestError.

        ``withdraw`` cancels what was sent when the caller is cancelled meanwhile.
        """
        has_ended = False
        try:
            for part in submission.parts:
                reply = await _to_its_end(self.call(part.call))
                if (error := refusal(reply, part.request_id)) is not None:
                    raise error
                has_ended |= reply.state is not None and reply.state.is_terminal
        except RequestError:
            if submission.is_own_id:  # nobody else knows the id, so nobody could use the others
                await self.cancel_quietly(submission.tenant, submission.part_ids)
            raise
        except asyncio.CancelledError:
            if withdraw:
                await self.cancel_quietly(submission.tenant, submission.part_ids)
            raise
        return has_ended

    async def members(self, tenant: str, request_id: str) -> list[RequestStatus]:
        """Return the status of a request, or of all n members of a group.

        Raises RequestNotFound.
        """
        if known := await self.call(status(self.keys, tenant=tenant, request_id=request_id)):
            return [known]
        found: list[RequestStatus] = []
        for index in range(MAX_N):
            member = member_id(request_id, index)
            known = await self.call(status(self.keys, tenant=tenant, request_id=member))
            if known is None:
                break
            found.append(known)
        if not found:
            raise RequestNotFound("this queue does not know it", request_id=request_id)
        return found

    async def cancel(self, tenant: str, request_id: str) -> RequestState | None:
        """Cancel one request; None where the queue does not know it."""
        return await self.call(cancel(self.keys, tenant=tenant, request_id=request_id))

    async def cancel_quietly(self, tenant: str, request_ids: list[str]) -> None:
        """Cancel for a caller that is leaving: it could do nothing about a failure."""
        try:
            async with asyncio.timeout(QUIET_CANCEL_S):
                for request_id in request_ids:
                    call = cancel(self.keys, tenant=tenant, request_id=request_id)
                    await self.call_once(call)
        except (TransportError, TimeoutError):
            return

    async def read(self, log: LogAssembly) -> Entries:
        """Read a log at once, beside the readers; raises TransportError."""
        try:
            found = await self._in_time(lambda: read_logs(self._redis, [log], None))
        except REDIS_FAILURES as error:
            failure = TransportError(f"Redis: {error}")
            failure.retryable_later = not is_refusal(error)
            raise failure from error
        return found[0][1] if found else []

    async def aclose(self) -> None:
        """Close every connection; safe to call twice."""
        self._is_closed = True
        await self.multiplexer.aclose()
        await self._redis.aclose()

    async def _unblock(self, connection_id: int) -> None:
        """End a blocking read early; raises redis-py's errors and TransportError."""
        await self._in_time(lambda: self._redis.client_unblock(connection_id))

    async def _in_time(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run one command as soon as a connection is free; raises TransportError when it hangs."""
        try:
            async with self._connection():
                if self._is_closed:
                    raise TransportError("the client is closed")
                async with asyncio.timeout(COMMAND_TIMEOUT_S):
                    return await work()
        except TimeoutError as error:
            failure = TransportError(f"Redis did not answer within {COMMAND_TIMEOUT_S:g} s")
            failure.retryable_later = True
            raise failure from error

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[None]:
        """Hold one of the connections while a call runs.

        When the call times out, so do the calls that wait for a connection; otherwise each of them
        would hang in turn.
        """
        async with asyncio.timeout(None) as waiting:
            self._waiting.add(waiting)
            try:
                await self._free.acquire()
            finally:
                self._waiting.discard(waiting)
        try:
            yield
        except TimeoutError:
            for waiting in self._waiting:
                waiting.reschedule(0.0)
            self._waiting.clear()
            raise
        finally:
            self._free.release()


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work; when cancelled, give it QUIET_CANCEL_S more to end before that is raised.

    An enqueue that was interrupted could reach Redis after the cancel that is meant to undo it.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        try:
            await asyncio.wait([task], timeout=QUIET_CANCEL_S)
        finally:  # also when the caller is cancelled a second time
            task.cancel()
        raise
