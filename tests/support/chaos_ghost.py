"""A stale writer: it held requests until its lease ran out, and never stops writing to them."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.functions import EmitItem, EmitOutcome, FinishOutcome, Grant
from headrace.protocol import ChunkMessage, encode_chunk
from support.chaos_result import Result
from support.queue_driver import QueueDriver
from support.streams import Asked
from support.workers import SHORT_LEASE_S

NAME = "ghost"


class Ghost:
    """Writes the right token at the right offset, so that only its epoch is wrong."""

    def __init__(self, driver: QueueDriver, asked: Sequence[Asked]) -> None:
        self._driver = driver
        self._answers = {request.request_id: request.answer for request in asked}
        total = sum(request.cost for request in asked)
        claim = driver.claim(
            NAME,
            free_seqs=len(asked),
            free_tokens=total,
            total_tokens=total,
            lease_ms=round(SHORT_LEASE_S * 1000),
        )
        self.grants: tuple[Grant, ...] = claim.grants
        self.num_tries = 0
        self.num_fenced = 0
        self.accepted: list[str] = []  # what was let through, which nothing may be

    @property
    def is_stale(self) -> bool:
        """Whether others hold by now all that it was granted."""
        epochs = [self._driver.status(grant.request_id).epoch for grant in self.grants]
        return all(now > grant.epoch for now, grant in zip(epochs, self.grants, strict=True))

    def write(self) -> None:
        """Try to emit the next token of each request, and to end it."""
        for grant in self.grants:
            offset = self._driver.status(grant.request_id).num_tokens
            due = self._answers[grant.request_id][offset : offset + 1]
            if due:
                self._emit(grant, offset, due)
            outcome = self._driver.finish(grant, offset, NAME).outcome
            self._count(grant, outcome.value, FinishOutcome.FENCED, FinishOutcome.OK)

    def tell(self, result: Result) -> None:
        """Write down what came of it."""
        result.measure("stale writes tried", self.num_tries, at_least=2 * len(self.grants))
        result.measure("FENCED", self.num_fenced, at_least=1)
        result.measure("stale writes accepted", len(self.accepted), at_most=0)
        result.problems += self.accepted

    def _emit(self, grant: Grant, offset: int, tokens: list[int]) -> None:
        entry = encode_chunk(ChunkMessage(tuple(tokens), ("?",)))
        item = EmitItem(grant.tenant, grant.request_id, grant.epoch, offset, 1, entry)
        (reply,) = self._driver.emit_all([item], NAME)
        self._count(grant, reply.outcome.value, EmitOutcome.FENCED, EmitOutcome.OK)

    def _count(self, grant: Grant, outcome: str, fenced: str, accepted: str) -> None:
        self.num_tries += 1
        self.num_fenced += outcome == fenced
        if outcome == accepted:
            self.accepted.append(f"{grant.request_id}: a write of epoch {grant.epoch} was accepted")
