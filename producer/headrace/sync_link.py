"""The blocking side of the wire: calls that outlive an outage, and one read over many logs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TypeVar

import redis
from redis import exceptions

from headrace.assembly import LogAssembly
from headrace.calls import Call, cancel, status
from headrace.connections import ConnectionSettings
from headrace.errors import RequestError, RequestNotFound, TransportError
from headrace.functions import run_sync
from headrace.groups import member_id
from headrace.keys import Keys
from headrace.patience import delays_s
from headrace.reading import Entries, is_refusal, read_logs_sync
from headrace.sampling import MAX_N
from headrace.submission import Submission, refusal
from headrace.types import RequestState, RequestStatus

T = TypeVar("T")


class SyncLink:
    """One queue as seen through one set of connections; threads may share it."""

    def __init__(self, settings: ConnectionSettings, keys: Keys, retry_s: float | None) -> None:
        self.keys = keys
        self._retry_s = retry_s  # how long to go on while Redis is away; None: for ever
        self._commands: redis.Redis = settings.commands_sync()
        self._readers: redis.Redis = settings.readers_sync()
        self._is_closed = False

    def call(self, call: Call[T]) -> T:
        """Call a function, again and again while Redis is away; raises TransportError.

        Every function is idempotent, so a call whose reply was lost may simply be made again.
        """
        give_up_s = None if self._retry_s is None else time.monotonic() + self._retry_s
        for delay_s in delays_s():
            try:
                return self.call_once(call)
            except TransportError as error:
                is_late = give_up_s is not None and time.monotonic() + delay_s >= give_up_s
                if is_late or not error.retryable_later:
                    raise
            time.sleep(delay_s)
        raise AssertionError("delays never end")

    def call_once(self, call: Call[T]) -> T:
        """Call a function without another try; raises TransportError."""
        if self._is_closed:
            raise TransportError("the client is closed")
        return run_sync(self._commands, call)

    def enqueue(self, submission: Submission, *, withdraw: bool) -> bool:
        """Send all parts; return whether any had ended before; raises RequestError.

        ``withdraw`` cancels what was sent when the caller is interrupted meanwhile.
        """
        has_ended = False
        try:
            for part in submission.parts:
                reply = self.call(part.call)
                if (error := refusal(reply, part.request_id)) is not None:
                    raise error
                has_ended |= reply.state is not None and reply.state.is_terminal
        except RequestError:
            if submission.is_own_id:  # nobody else knows the id, so nobody could use the others
                self.cancel_quietly(submission.tenant, submission.part_ids)
            raise
        except TransportError:
            raise
        except BaseException:  # Ctrl-C, or what a signal handler raises, such as a time limit
            if withdraw:
                self.cancel_quietly(submission.tenant, submission.part_ids)
            raise
        return has_ended

    def members(self, tenant: str, request_id: str) -> list[RequestStatus]:
        """Return the status of a request, or of all n members of a group.

        Raises RequestNotFound.
        """
        if known := self.call(status(self.keys, tenant=tenant, request_id=request_id)):
            return [known]
        found: list[RequestStatus] = []
        for index in range(MAX_N):
            member = member_id(request_id, index)
            known = self.call(status(self.keys, tenant=tenant, request_id=member))
            if known is None:
                break
            found.append(known)
        if not found:
            raise RequestNotFound("this queue does not know it", request_id=request_id)
        return found

    def cancel(self, tenant: str, request_id: str) -> RequestState | None:
        """Cancel one request; None where the queue does not know it."""
        return self.call(cancel(self.keys, tenant=tenant, request_id=request_id))

    def cancel_quietly(self, tenant: str, request_ids: Sequence[str]) -> None:
        """Cancel for a caller that is leaving: it could do nothing about a failure."""
        try:
            for request_id in request_ids:
                self.call_once(cancel(self.keys, tenant=tenant, request_id=request_id))
        except TransportError:
            return

    def read(
        self, logs: Iterable[LogAssembly], block_s: float | None
    ) -> list[tuple[LogAssembly, Entries]]:
        """Read logs, waiting for the first news; raises TransportError."""
        if self._is_closed:
            raise TransportError("the client is closed")
        try:
            return read_logs_sync(self._readers, logs, block_s)
        # redis-py also raises TypeError and the like when a connection breaks at the wrong moment,
        # and this read may simply be made again. What a signal handler raises is not caught: it
        # shall end the wait.
        except (exceptions.RedisError, OSError, AttributeError, TypeError, ValueError) as error:
            failure = TransportError(f"Redis: {error}")
            failure.retryable_later = not is_refusal(error)
            raise failure from error

    def close(self) -> None:
        """Close every connection; safe to call twice."""
        self._is_closed = True
        self._commands.close()
        self._readers.close()
