"""Claiming, safe against lost replies: an unanswered claim is asked again under the same nonce.

The queue remembers a worker's last claim and answers the same nonce with the same grants. So
grants whose reply was lost go to the next try, and need not wait for their leases to run out.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from headrace import functions
from headrace.functions import ClaimReply
from headrace.keys import Keys
from headrace_worker import logs
from headrace_worker.transport.link import Link


class Claimer:
    """One claim at a time."""

    def __init__(
        self, link: Link, keys: Keys, *, worker_id: str, lease_ms: int, max_strikes: int
    ) -> None:
        self._link = link
        self._keys = keys
        self._worker_id = worker_id
        self._lease_ms = lease_ms
        self._max_strikes = max_strikes
        self._nonce: str | None = None  # of a claim without an answer
        self._skipped: frozenset[str] = frozenset()  # lanes that the last claim could not read
        self._log = logs.get_logger()

    async def claim(
        self,
        *,
        free_seqs: int,
        free_tokens: int,
        total_tokens: int,
        if_displaced: Sequence[tuple[int, int, int]] = (),
    ) -> ClaimReply:
        """Take what fits; raises TransportError, and then the next call asks for the same again."""
        self._nonce = self._nonce or secrets.token_hex(8)
        reply = await self._link.run(
            functions.claim(
                self._keys,
                worker_id=self._worker_id,
                nonce=self._nonce,
                free_seqs=free_seqs,
                free_tokens=free_tokens,
                total_tokens=total_tokens,
                lease_ms=self._lease_ms,
                max_strikes=self._max_strikes,
                if_displaced=if_displaced,
            )
        )
        self._nonce = None
        self._tell_skipped(frozenset(reply.broken_lanes))
        return reply

    def _tell_skipped(self, lanes: frozenset[str]) -> None:
        """Say once of each lane that its key is of the wrong type: an operator has to look."""
        for lane in sorted(lanes - self._skipped):
            self._log.warning(logs.LANE_SKIPPED, key=lane)
        self._skipped = lanes
