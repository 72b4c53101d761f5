"""Every error that Headrace raises, in one tree.

HeadraceError
├── ConfigurationError (also ValueError)      found before any I/O
├── TransportError                            Redis unreachable or refusing; __cause__ has it
│   └── ProtocolError                         undecodable message or unknown version
├── RequestTimeout                            named by what was awaited
│   ├── FirstChunkTimeout                     nothing yet: queue too long or no worker
│   ├── StreamStalled                         chunks stopped coming
│   └── DeadlineExceeded                      total time is over
├── StreamConsumed                            programming error: iterated twice
├── StreamUnfinished                          programming error: no completion before the end
└── RequestError                              the answer is "no"
    ├── InvalidRequest (also ValueError)      bad parameters, prompt too long, undecodable
    ├── UnknownModel                          no worker of this queue serves that model
    ├── Overloaded                            a .bound is reached; try again after .retry_after_s
    ├── RequestCancelled                      somebody cancelled it
    ├── RequestConflict                       same id, other payload
    ├── RequestNotFound                       this queue never heard of the id
    ├── RequestExpired                        its deadline passed in the queue, or its result's TTL
    ├── RequestLost                           Redis lost its data while it was in flight
    ├── DeadLettered                          it took down the worker that ran it alone
    └── EngineFailure                         fault of ours; details are in the worker's log
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class ErrorCode(StrEnum):
    """What a terminal error is called on the wire; a closed set."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    KV_CAPACITY_EXCEEDED = "kv_capacity_exceeded"
    UNDECODABLE = "undecodable"
    UNSUPPORTED_VERSION = "unsupported_version"
    UNKNOWN_MODEL = "unknown_model"
    OVERLOADED = "overloaded"
    CANCELLED = "cancelled"
    CONFLICT = "conflict"
    NOT_FOUND = "not_found"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    RESULT_EXPIRED = "result_expired"
    LOST = "lost"
    DEAD_LETTERED = "dead_lettered"
    ENGINE_FAILURE = "engine_failure"


class QueueBound(StrEnum):
    """Which bound on the number of queued requests keeps another one out."""

    QUEUE = "queue"  # of all tenants together
    TENANT = "tenant"  # of this one: others may go on


MAX_MESSAGE_LENGTH = 500
"""Characters of an error's message; the value it names may be megabytes long."""


class HeadraceError(Exception):
    """Base of everything raised on purpose."""


class ConfigurationError(HeadraceError, ValueError):
    """A setting or an argument is wrong; no I/O has happened."""


class TransportError(HeadraceError):
    """Redis is unreachable, closed the connection, or refused the command."""

    retryable_later = False  # whether the same call may succeed once Redis is well again


class ProtocolError(TransportError):
    """A message cannot be decoded, or speaks an unknown version."""


class RequestTimeout(HeadraceError):
    """Waiting ended before the request did; the request itself may go on."""

    def __init__(self, request_id: str, waited_s: float, awaited: str) -> None:
        self.request_id = request_id
        self.waited_s = waited_s
        self.awaited = awaited
        super().__init__(f"request {request_id!r}: waited {waited_s:g} s for {awaited}")

    def __reduce__(self) -> tuple[type[RequestTimeout], tuple[str, float, str]]:
        # Backends send exceptions between processes; args alone would not rebuild this one.
        return type(self), (self.request_id, self.waited_s, self.awaited)


class FirstChunkTimeout(RequestTimeout):
    """Nothing arrived yet: the queue is too long, or no worker is running."""


class StreamStalled(RequestTimeout):
    """Chunks had been arriving and stopped."""


class DeadlineExceeded(RequestTimeout):
    """The total time that the caller allowed is over."""


class StreamConsumed(HeadraceError):
    """A stream was iterated twice; attach() gives a fresh one."""


class StreamUnfinished(HeadraceError):
    """A stream was asked for its completion before its end."""


class RequestError(HeadraceError):
    """The request was answered, and the answer is "no"."""

    retryable: ClassVar[bool] = False
    default_code: ClassVar[ErrorCode] = ErrorCode.INVALID_REQUEST

    def __init__(
        self,
        message: str,
        *,
        request_id: str | None = None,
        code: ErrorCode | None = None,
        worker_id: str | None = None,
    ) -> None:
        self.message = message = _shorten(message)
        self.request_id = request_id
        self.code = code or self.default_code
        self.worker_id = worker_id
        super().__init__(message)

    def __str__(self) -> str:
        known = self.request_id is not None
        return f"request {self.request_id!r}: {self.message}" if known else self.message


class InvalidRequest(RequestError, ValueError):
    """A parameter is out of range, the prompt does not fit, or the message cannot be read."""


class UnknownModel(RequestError):
    """The named model is not the one that this queue's workers serve."""

    default_code = ErrorCode.UNKNOWN_MODEL


class Overloaded(RequestError):
    """A bound on queued requests is reached, of the queue or of the tenant."""

    retryable = True
    default_code = ErrorCode.OVERLOADED

    def __init__(
        self,
        message: str,
        *,
        request_id: str | None = None,
        code: ErrorCode | None = None,
        worker_id: str | None = None,
        retry_after_s: float = 1.0,
        bound: QueueBound = QueueBound.QUEUE,
    ) -> None:
        self.retry_after_s = retry_after_s
        self.bound = bound
        super().__init__(message, request_id=request_id, code=code, worker_id=worker_id)

    @property
    def retry_after(self) -> float:
        """Seconds to wait before the next try, under the name HTTP gives it."""
        return self.retry_after_s


class RequestCancelled(RequestError):
    """The request was cancelled before it finished."""

    default_code = ErrorCode.CANCELLED


class RequestConflict(RequestError):
    """The id is taken by a request with another payload."""

    default_code = ErrorCode.CONFLICT


class RequestNotFound(RequestError):
    """The queue never heard of this id, or has forgotten it altogether."""

    default_code = ErrorCode.NOT_FOUND


class RequestExpired(RequestError):
    """The deadline passed while the request waited, or its result outlived its TTL."""

    default_code = ErrorCode.RESULT_EXPIRED


class RequestLost(RequestError):
    """Redis lost the request's data while somebody was waiting for it."""

    retryable = True
    default_code = ErrorCode.LOST


class DeadLettered(RequestError):
    """The request took down the worker that ran it alone."""

    default_code = ErrorCode.DEAD_LETTERED


class EngineFailure(RequestError):
    """The engine failed; trying again may work."""

    retryable = True
    default_code = ErrorCode.ENGINE_FAILURE


CLASS_OF_CODE: dict[ErrorCode, type[RequestError]] = {
    ErrorCode.INVALID_REQUEST: InvalidRequest,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: InvalidRequest,
    ErrorCode.KV_CAPACITY_EXCEEDED: InvalidRequest,
    ErrorCode.UNDECODABLE: InvalidRequest,
    ErrorCode.UNSUPPORTED_VERSION: InvalidRequest,
    ErrorCode.UNKNOWN_MODEL: UnknownModel,
    ErrorCode.OVERLOADED: Overloaded,
    ErrorCode.CANCELLED: RequestCancelled,
    ErrorCode.CONFLICT: RequestConflict,
    ErrorCode.NOT_FOUND: RequestNotFound,
    ErrorCode.DEADLINE_EXCEEDED: RequestExpired,
    ErrorCode.RESULT_EXPIRED: RequestExpired,
    ErrorCode.LOST: RequestLost,
    ErrorCode.DEAD_LETTERED: DeadLettered,
    ErrorCode.ENGINE_FAILURE: EngineFailure,
}


def error_for(
    code: ErrorCode,
    message: str,
    *,
    request_id: str | None = None,
    worker_id: str | None = None,
) -> RequestError:
    """Return the exception, not raised, that stands for a terminal error from the wire."""
    return CLASS_OF_CODE[code](message, request_id=request_id, code=code, worker_id=worker_id)


def _shorten(message: str) -> str:
    if len(message) <= MAX_MESSAGE_LENGTH:
        return message
    return message[: MAX_MESSAGE_LENGTH - 1] + "…"
