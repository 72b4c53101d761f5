"""What both clients know before any I/O: their settings, and how arguments become a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.assembly import LogAssembly, StreamAssembly
from headrace.connections import ConnectionSettings
from headrace.errors import ConfigurationError, InvalidRequest
from headrace.keys import Keys, check_tenant
from headrace.options import milliseconds
from headrace.submission import Defaults, Submission, prepare
from headrace.types import Prompt, RequestStatus, Timeout

DEFAULT_MAX_CONNECTIONS = 16
# Most requests of a bulk run wait behind the others, and after a takeover the next worker has to
# prefill all of them first.
BULK_TIMEOUT = Timeout(first_chunk=3600.0, between_chunks=600.0)


class ClientCore:
    """Settings of one client; checked here, never changed."""

    def __init__(
        self,
        url: str,
        *,
        queue: str,
        tenant: str,
        timeout: Timeout | None,
        result_ttl: float,
        max_queued: int | None,
        max_queued_per_tenant: int | None,
        max_connections: int,
    ) -> None:
        bounds = {"max_queued": max_queued, "max_queued_per_tenant": max_queued_per_tenant}
        for name, bound in bounds.items():
            if bound is not None:
                check_count(name, bound)
        self.keys = Keys(queue)
        self.timeout = _checked(timeout, Timeout())
        self.bulk_timeout = _checked(timeout, BULK_TIMEOUT)
        self.connections = ConnectionSettings(url, max_connections)
        self._defaults = Defaults(
            keys=self.keys,
            tenant=check_tenant(tenant),
            result_ttl_ms=milliseconds("result_ttl", result_ttl),
            max_queued=max_queued,
            max_queued_per_tenant=max_queued_per_tenant,
        )

    def prepare(
        self, prompt: Prompt | None, options: Mapping[str, Any], *, attached: bool
    ) -> Submission:
        """Return what is to be sent; raises InvalidRequest."""
        return prepare(self._defaults, prompt, options, attached=attached, now_s=time.time())

    def tenant(self, tenant: str | None) -> str:
        """Return the tenant that a call means; raises InvalidRequest."""
        return self._defaults.tenant if tenant is None else check_tenant(tenant)

    def timeout_of(self, timeout: Timeout | None) -> Timeout:
        """Return the timeouts of one call; raises ConfigurationError."""
        return _checked(timeout, self.timeout)

    def bulk_timeout_of(self, timeout: Timeout | None) -> Timeout:
        """Return the timeouts of each request of a bulk run; raises ConfigurationError."""
        return _checked(timeout, self.bulk_timeout)

    def assemble(self, submission: Submission) -> StreamAssembly:
        """Return the empty stream of a new request."""
        logs = [
            LogAssembly(part.request_id, part.log_key, choice=i, metadata=submission.metadata)
            for i, part in enumerate(submission.parts)
        ]
        return StreamAssembly(submission.request_id, logs)

    def assemble_members(
        self, request_id: str, tenant: str, members: Sequence[RequestStatus], after: tuple[int, ...]
    ) -> StreamAssembly:
        """Return the stream of a request that exists, from the given offsets on."""
        offsets = after * len(members) if len(after) == 1 else after
        if len(offsets) != len(members):
            raise InvalidRequest(
                f"after has {len(offsets)} offsets for {len(members)} answers",
                request_id=request_id,
            )
        logs = [
            LogAssembly(
                member.request_id,
                self.keys.token_log(tenant, member.request_id),
                after=offset,
                choice=i,
            )
            for i, (member, offset) in enumerate(zip(members, offsets, strict=True))
        ]
        return StreamAssembly(request_id, logs)


def _checked(timeout: Timeout | None, default: Timeout) -> Timeout:
    if timeout is None:
        return default
    if not isinstance(timeout, Timeout):
        raise ConfigurationError(
            f"timeout must be a Timeout, such as Timeout(total={timeout!r}), not {timeout!r}"
        )
    return timeout


def check_after(after: object) -> tuple[int, ...]:
    """Return offsets to read on from, one or one an answer; raises InvalidRequest."""
    offsets = tuple(after) if isinstance(after, list | tuple) else (after,)
    for offset in offsets:
        if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
            raise InvalidRequest(f"after must be a count of tokens, not {offset!r}")
    return offsets


def check_count(name: str, value: object) -> None:
    """Raise ConfigurationError unless the value is a whole number above zero."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} must be a whole number above 0, not {value!r}")
