"""Client: everything a backend does with a queue, from threads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Unpack, overload

from headrace.assembly import Opened
from headrace.bulk import DraftMaker, Item, refuse_text
from headrace.calls import Call, cancel, finish_now, reprioritise
from headrace.core import DEFAULT_MAX_CONNECTIONS, ClientCore, check_after, check_count
from headrace.errors import RequestError, RequestTimeout
from headrace.groups import merge_statuses
from headrace.keys import check_request_id
from headrace.options import RequestOptions, check_priority
from headrace.submission import Submission
from headrace.sync_bulk import Bulk
from headrace.sync_link import SyncLink
from headrace.sync_stream import SyncTokenStream
from headrace.types import Completion, Prompt, RequestState, RequestStatus, Timeout


class Client:
    """A queue, from the side that asks.

    ``url`` names a Redis or Valkey; ``result_ttl`` is how many seconds a result stays readable
    after its end; ``max_queued`` and ``max_queued_per_tenant`` bound what waits, Overloaded
    beyond them; ``max_connections`` bounds the connections, and half of it the streams that are
    read at the same time. No I/O happens before the first call. Threads may share a client, not a
    stream.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        *,
        queue: str = "default",
        tenant: str = "default",
        timeout: Timeout | None = None,
        result_ttl: float = 3600.0,
        max_queued: int | None = None,
        max_queued_per_tenant: int | None = None,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
    ) -> None:
        self._core = ClientCore(
            url,
            queue=queue,
            tenant=tenant,
            timeout=timeout,
            result_ttl=result_ttl,
            max_queued=max_queued,
            max_queued_per_tenant=max_queued_per_tenant,
            max_connections=max_connections,
        )
        self._link = SyncLink(self._core.connections, self._core.keys, self._core.timeout.redis)

    def submit(self, prompt: Prompt | None = None, **options: Unpack[RequestOptions]) -> str:
        """Queue a request and return its id; nobody has to wait for it.

        The same id with the same payload is the same request, so this may be called again. Raises
        InvalidRequest before any I/O, RequestConflict, Overloaded, TransportError.
        """
        submission = self._core.prepare(prompt, options, attached=False)
        self._link.enqueue(submission, withdraw=submission.is_own_id)
        return submission.request_id

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        timeout: Timeout | None = None,
        cancel_on_exit: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """Queue a request and wait for its result.

        Raises what ``submit`` raises, RequestTimeout, and the RequestError that the worker
        answers. When the caller is interrupted or times out, the request is cancelled.
        """
        submission = self._core.prepare(prompt, options, attached=False)
        with self._stream(submission, timeout, cancel_on_exit) as stream:
            return stream.read()

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        timeout: Timeout | None = None,
        cancel_on_exit: bool = True,
        **options: Unpack[RequestOptions],
    ) -> SyncTokenStream:
        """Queue a request on entry, and read its chunks as they come.

        Wrong arguments raise InvalidRequest at once; entering raises what ``submit`` raises.
        """
        submission = self._core.prepare(prompt, options, attached=True)
        return self._stream(submission, timeout, cancel_on_exit)

    def attach(
        self,
        request_id: str,
        *,
        after: int | Sequence[int] = 0,
        tenant: str | None = None,
        timeout: Timeout | None = None,
        cancel_on_exit: bool = False,
    ) -> SyncTokenStream:
        """Read the chunks of a request that exists, from token offset ``after`` on.

        With n answers, ``after`` may hold one offset for each. The completion holds what came
        after the offset. Entering raises RequestNotFound.
        """
        name, owner = check_request_id(request_id), self._core.tenant(tenant)
        offsets = check_after(after)

        def opening() -> Opened:
            members = self._link.members(owner, name)
            assembly = self._core.assemble_members(name, owner, members, offsets)
            return Opened(assembly, any(member.state.is_terminal for member in members))

        return SyncTokenStream(
            self._link,
            opening,
            request_id=name,
            tenant=owner,
            timeout=self._core.timeout_of(timeout),
            cancel_on_exit=cancel_on_exit,
        )

    @overload
    def generate_many(
        self,
        prompts: Iterable[Item],
        *,
        max_in_flight: int = 64,
        return_errors: Literal[False] = False,
        timeout: Timeout | None = None,
        cancel_on_exit: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Generator[Completion, None, None]: ...

    @overload
    def generate_many(
        self,
        prompts: Iterable[Item],
        *,
        max_in_flight: int = 64,
        return_errors: Literal[True],
        timeout: Timeout | None = None,
        cancel_on_exit: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Generator[Completion | RequestError | RequestTimeout, None, None]: ...

    def generate_many(
        self,
        prompts: Iterable[Item],
        *,
        max_in_flight: int = 64,
        return_errors: bool = False,
        timeout: Timeout | None = None,
        cancel_on_exit: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Generator[Any, None, None]:
        """Yield results in the order of completion, with at most ``max_in_flight`` under way.

        Prompts are read as they are needed. The request of prompt number i has the id
        ``<request_id>:<i>``. The first failure is raised and cancels the rest, unless
        ``return_errors`` has failures yielded in the place of their results. A full queue is
        waited out, and so is a long one: unless a timeout was given here or to the client, a first
        chunk may take an hour.
        """
        refuse_text(prompts)
        check_count("max_in_flight", max_in_flight)
        bulk = Bulk(
            self._core,
            self._link,
            DraftMaker(options),
            timeout=self._core.bulk_timeout_of(timeout),
            cancel_on_exit=cancel_on_exit,
        )
        return bulk.run(prompts, max_in_flight, return_errors=return_errors)

    def status(self, request_id: str, *, tenant: str | None = None) -> RequestStatus:
        """Return what the queue knows of a request; raises RequestNotFound."""
        name = check_request_id(request_id)
        members = self._link.members(self._core.tenant(tenant), name)
        return members[0] if members[0].request_id == name else merge_statuses(name, members)

    def cancel(self, request_id: str, *, tenant: str | None = None) -> RequestState:
        """Cancel a request and return its state: RUNNING until its worker has stopped.

        A request that has ended stays as it is. Raises RequestNotFound.
        """
        return self._tell(request_id, tenant, cancel)

    def finish_now(self, request_id: str, *, tenant: str | None = None) -> RequestState:
        """End a request with its text so far, and return its state: RUNNING until that is done.

        Its completion has the finish reason STOPPED_EARLY. One that waits ends at once, empty; one
        that has ended stays as it is. Raises RequestNotFound.
        """
        return self._tell(request_id, tenant, finish_now)

    def reprioritise(
        self, request_id: str, priority: int, *, tenant: str | None = None
    ) -> RequestState:
        """Change how soon a request is served, 0 to 9; return its state.

        One that waits goes behind what waits there already; one that has ended stays as it is.
        Raises InvalidRequest, RequestNotFound.
        """
        ask = partial(reprioritise, priority=check_priority(priority))
        return self._tell(request_id, tenant, ask)

    def close(self) -> None:
        """Close every connection; open streams end with TransportError."""
        self._link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _tell(
        self, request_id: str, tenant: str | None, ask: Callable[..., Call[RequestState | None]]
    ) -> RequestState:
        """Ask something of a request, or of all members of a group; return the state afterwards."""
        name, owner = check_request_id(request_id), self._core.tenant(tenant)
        for member in self._link.members(owner, name):
            call = ask(self._link.keys, tenant=owner, request_id=member.request_id)
            self._link.call(call)
        return self.status(name, tenant=owner).state

    def _stream(
        self, submission: Submission, timeout: Timeout | None, cancel_on_exit: bool
    ) -> SyncTokenStream:
        def opening() -> Opened:
            has_ended = self._link.enqueue(submission, withdraw=cancel_on_exit)
            return Opened(self._core.assemble(submission), has_ended)

        return SyncTokenStream(
            self._link,
            opening,
            request_id=submission.request_id,
            tenant=submission.tenant,
            timeout=self._core.timeout_of(timeout),
            cancel_on_exit=cancel_on_exit,
        )
