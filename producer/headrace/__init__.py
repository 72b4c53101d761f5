"""Headrace: push prompts to Redis Streams, read tokens back exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import (
    ConfigurationError,
    DeadLettered,
    DeadlineExceeded,
    EngineFailure,
    ErrorCode,
    FirstChunkTimeout,
    HeadraceError,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    QueueBound,
    RequestCancelled,
    RequestConflict,
    RequestError,
    RequestExpired,
    RequestLost,
    RequestNotFound,
    RequestTimeout,
    StreamConsumed,
    StreamStalled,
    StreamUnfinished,
    TransportError,
    UnknownModel,
)
from headrace.sampling import SamplingParams
from headrace.types import (
    Chunk,
    Completion,
    FinishReason,
    Message,
    Prompt,
    RequestState,
    RequestStatus,
    Timeout,
    Timings,
    TokenLogprob,
    Usage,
)

if TYPE_CHECKING:
    from headrace.client import AsyncClient
    from headrace.stream import TokenStream
    from headrace.sync_client import Client
    from headrace.sync_stream import SyncTokenStream

__all__ = [
    "AsyncClient",
    "Chunk",
    "Client",
    "Completion",
    "ConfigurationError",
    "DeadLettered",
    "DeadlineExceeded",
    "EngineFailure",
    "ErrorCode",
    "FinishReason",
    "FirstChunkTimeout",
    "HeadraceError",
    "InvalidRequest",
    "Message",
    "Overloaded",
    "Prompt",
    "ProtocolError",
    "QueueBound",
    "RequestCancelled",
    "RequestConflict",
    "RequestError",
    "RequestExpired",
    "RequestLost",
    "RequestNotFound",
    "RequestState",
    "RequestStatus",
    "RequestTimeout",
    "SamplingParams",
    "StreamConsumed",
    "StreamStalled",
    "StreamUnfinished",
    "SyncTokenStream",
    "Timeout",
    "Timings",
    "TokenLogprob",
    "TokenStream",
    "TransportError",
    "UnknownModel",
    "Usage",
]

# Imported on first use: the clients load redis-py (0.1 s), which code that needs types and errors
# only, such as the engine, does not pay for.
_MODULE_OF = {
    "AsyncClient": "headrace.client",
    "Client": "headrace.sync_client",
    "SyncTokenStream": "headrace.sync_stream",
    "TokenStream": "headrace.stream",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value
