"""One step ahead: the next step is scheduled and launched while the device still computes the last.

So the device never waits for Python. What the host does not know yet, it does not need: the input
of a decode is read from the sampled ids on the device, and only their number is counted here::

    host     schedule 2 · launch 2 · land 1 · tell 1 │ schedule 3 · launch 3 · land 2 · tell 2 │
    device   ──── step 1 ────────│──────────── step 2 ──────────────│──────── step 3 ─────────

* An end, whatever its cause, is seen one step late: the token after it is dropped, and the blocks
  are free once the step that still writes to them has landed. An end by length is foreseen.
* Where the next step needs the last one's tokens on the host (grammars, penalties, bad words,
  scores), or somebody has to give way for want of blocks, the engine lands first, then schedules:
  that step is what the plain engine's would have been.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from headrace_worker.engine.engine import Engine
from headrace_worker.engine.errors import EngineStepError
from headrace_worker.engine.grammar_compiler import GrammarCompiler
from headrace_worker.engine.messages import StepOutcome
from headrace_worker.engine.running import RowResult, check_answers
from headrace_worker.engine.schedule import Schedule, ScheduledSequence
from headrace_worker.engine.scheduler import Scheduler
from headrace_worker.engine.sequence import Sequence, SequenceStatus


class LaunchedStep(Protocol):
    """A step that the device works on."""

    def collect(self) -> list[RowResult]:
        """Wait for the step and return what became of its rows, as ``Runner.execute`` does."""
        ...

    @property
    def corrected(self) -> frozenset[int]:
        """Sequences whose token, once collected, is not the one that the next step has read."""
        ...


class AheadRunner(Protocol):
    """Computes what was scheduled, and gives the host its time back while it does."""

    def launch(self, scheduled: ReadOnlyList[ScheduledSequence]) -> LaunchedStep:
        """Start one forward after those launched before; it may take its time if a share must land.

        A share with a pending token reads it where the step launched last has left it. Raises as
        ``Runner.execute`` does.
        """
        ...

    def execute(self, scheduled: ReadOnlyList[ScheduledSequence]) -> list[RowResult]:
        """Run one forward and wait for it."""
        ...


@dataclass(frozen=True, slots=True)
class _Share:
    """A share as it was launched: the sequence itself goes on changing."""

    seq: Sequence
    start: int  # its first token
    end: int  # after its last token
    samples: bool


@dataclass(slots=True)
class _Flight:
    """A step between its launch and its landing."""

    step: LaunchedStep
    schedule: Schedule
    shares: tuple[_Share, ...]
    must_land_first: bool  # before the next step is scheduled
    void: set[int] = field(default_factory=set)  # seq_ids whose shares count for nothing

    def counts(self, share: _Share) -> bool:
        """Whether a share still matters: its sequence is here, and has not gone back behind it."""
        return share.seq.status is not SequenceStatus.FINISHED and share.seq.seq_id not in self.void


class OneAheadEngine(Engine):
    """An engine whose outcomes are those of the step before the one it has just launched."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: AheadRunner,
        *,
        vocab_size: int,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        super().__init__(scheduler, runner, vocab_size=vocab_size, grammars=grammars)
        self._ahead = runner
        self._flight: _Flight | None = None  # launched last, not landed

    @property
    def has_work(self) -> bool:
        """Whether a step would do or report anything."""
        return self._flight is not None or super().has_work

    def step(self) -> StepOutcome:
        """Schedule → launch → land the step before; one outcome.

        Raises EngineStepError with the sequences of all steps in flight when the runner is broken.
        """
        started_s = perf_counter()
        self.num_steps += 1
        results: list[RowResult] = []
        if self._flight and self._flight.must_land_first:
            results += self._land_flight()
        before = self._flight
        schedule = self.scheduler.schedule(before.schedule if before else None)
        self._launch(schedule, before)
        if before:
            results += self._land(before)
        self._make_room(is_alone=before is None)
        return self._outcome(schedule, results, started_s)

    def _land_flight(self) -> list[RowResult]:
        flight, self._flight = self._flight, None
        return self._land(flight) if flight else []

    def _launch(self, schedule: Schedule, before: _Flight | None) -> None:
        scheduled, self._flight = schedule.in_batch_order(), None
        self._tell_bystanders(scheduled, _seqs(before))
        if not scheduled:
            return
        shares = tuple(map(_as_launched, scheduled))
        must_land_first = schedule.is_held_up or any(share.must_land_first for share in scheduled)
        try:
            step = self._attempt(self._ahead.launch, scheduled)
        except EngineStepError as error:
            raise _with(error, _seqs(before)) from error
        if step is not None:
            self.scheduler.take_off(scheduled)
            self._flight = _Flight(step, schedule, shares, must_land_first)

    def _land(self, flight: _Flight) -> list[RowResult]:
        """Wait for a step, and take in what it says of the sequences that are still here."""
        told = self._collect(flight)
        here = {share.seq.seq_id: share for share in flight.shares if flight.counts(share)}
        self.scheduler.land(
            (share.seq, share.end if share.seq.seq_id in here else None) for share in flight.shares
        )
        for share in here.values():  # whatever came of it: a token, or a failure that is mended
            share.seq.num_pending_tokens -= share.samples
        results = [result for result in told if result.seq_id in here]
        for result in results:
            self._take(here[result.seq_id].seq, result)
        check_answers({share.seq.seq_id for share in here.values() if share.samples}, results)
        self._take_back(flight.step.corrected & here.keys())
        return results

    def _collect(self, flight: _Flight) -> list[RowResult]:
        try:
            return flight.step.collect()
        except Exception as error:  # the step boundary: whatever it is, say who was in the batch
            raise self._breakdown(error, [*_seqs(flight), *_seqs(self._flight)]) from error

    def _take_back(self, seq_ids: frozenset[int]) -> None:
        """Void the shares of the step in flight that began with a token which was then corrected.

        What they write is written again: the sequence goes on from where it was before them.
        """
        flight = self._flight
        if flight is None or not seq_ids:
            return
        for share in flight.shares:
            if share.seq.seq_id in seq_ids and flight.counts(share):
                share.seq.num_computed_tokens = share.start
                share.seq.num_pending_tokens -= share.samples
                flight.void.add(share.seq.seq_id)


def _as_launched(share: ScheduledSequence) -> _Share:
    start = share.seq.num_computed_tokens
    return _Share(share.seq, start, start + share.num_new_tokens, share.samples)


def _seqs(flight: _Flight | None) -> list[Sequence]:
    return [share.seq for share in flight.shares] if flight else []


def _with(error: EngineStepError, others: Iterable[Sequence]) -> EngineStepError:
    """Name those in flight, too: they are lost with the engine."""
    seq_ids = dict.fromkeys((*error.sequence_ids, *(seq.seq_id for seq in others)))
    return EngineStepError(str(error), tuple(seq_ids))
