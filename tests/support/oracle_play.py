"""All that a worker can do to an engine, over the oracle; whoever plays decides what comes next."""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace_worker.attention.base import AttentionBackend, PackedBatch
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.errors import EngineStepError
from headrace_worker.engine.messages import AddSequence
from headrace_worker.engine.sequence import Sequence, SequenceStatus
from support.fake_capture import FakeCapture
from support.oracle import OracleDecoder, make_engine, request
from support.oracle_answer import whole_answer
from support.oracle_books import check_books, check_outcome
from support.oracle_limits import Limits, Tally
from support.oracle_witness import Witness


class Play:
    """One engine from its first request to the last; every step is checked."""

    def __init__(self, limits: Limits, tally: Tally) -> None:
        self.limits = limits
        self.tally = tally
        self.witness = Witness(limits, tally)
        self.decoder = BreakableDecoder(nan_after=limits.poison)
        self.engine = _make_engine(limits, self.decoder)
        self.num_ids = 0  # sequence ids are 1 ... num_ids
        self.priorities: dict[int, int] = {}  # by sequence id
        self.is_sound = True  # no check has failed
        tally.schedules += 1

    def add(self, command: AddSequence) -> None:
        """A request arrives; it gets the next sequence id."""
        self.num_ids += 1
        command = replace(command, seq_id=self.num_ids)
        self.engine.add(command)
        self.witness.add(command)
        self.priorities[self.num_ids] = command.priority

    def take_over(self, which: int, num_told: int) -> None:
        """A request of another worker comes with the tokens that its log already holds."""
        command = self.witness.tracked[self._pick(which)].command
        whole = whole_answer(command, max_model_len=self.limits.context, poison=self.limits.poison)
        prompt = command.token_ids[: command.num_prompt_tokens]
        self.add(replace(command, token_ids=prompt + whole.tokens[:num_told]))
        self.tally.takeovers += 1

    def add_again(self, which: int) -> None:
        """A command is repeated while its sequence is here: it is not started twice."""
        seq_id = self._pick(which)
        if self.witness.is_here(seq_id):
            self.engine.add(self.witness.tracked[seq_id].command)

    def abort(self, which: int) -> None:
        """A request is cancelled, twice: waiting, running, preempted or over long ago."""
        seq_id = self._pick(which)
        self.engine.abort([seq_id, seq_id, self.num_ids + 1])
        if self.witness.is_here(seq_id):
            self.witness.abort(seq_id)
        check_books(self.engine)

    def reprioritise(self, which: int, priority: int) -> None:
        """A client wants a request sooner or later: waiting, running or over long ago."""
        seq_id = self._pick(which)
        self.engine.reprioritise(seq_id, priority)
        self.engine.reprioritise(self.num_ids + 1, priority)
        self.priorities[seq_id] = priority
        check_books(self.engine)

    def fail_a_step(self, which: int, is_late: bool) -> None:
        """A step fails and names one sequence of its batch; it may have written by then."""
        if running := self.engine.scheduler.running:
            self.decoder.break_for(running[which % len(running)], is_late)
        self.step()

    def run_out_of_memory(self) -> None:
        """The device finds no memory for the next step, and then does again."""
        if not self.limits.is_fast:
            self.decoder.run_out()
            self.tally.shortages += 1
        self.step()

    def step(self) -> None:
        """The engine does one step, if it has anything to do."""
        if not self.engine.has_work:
            return
        has_sequences = self.engine.scheduler.running or self.engine.scheduler.waiting
        self.is_sound = False
        gone = [seq for seq, _ in self.engine.scheduler.lingering]
        is_landing = any(seq.num_steps_in_flight for seq in self.engine.scheduler.running + gone)
        before = self._running()
        outcome = self.engine.step()
        self.witness.take(outcome, self.decoder.mend())
        check_outcome(outcome, self.limits)
        told = {token.seq_id for token in outcome.tokens}
        if not self.decoder.ran_out():
            self._check_places((self._running() | told) - before, outcome.preempted)
        check_books(self.engine)
        is_idle = not (outcome.num_scheduled_tokens or is_landing)
        assert not (is_idle and has_sequences), "a step computed nothing"
        self.is_sound = True

    def drain(self) -> None:
        """All that is left ends in a bounded number of steps, and the pool is whole."""
        bound = self._most_steps()
        for _ in range(bound):
            self.step()
        assert not self.engine.has_work, f"{bound} steps, and no end"
        assert self.witness.live() == []
        assert self.engine.scheduler.pool.num_free == self.limits.num_blocks

    def _running(self) -> set[int]:
        return {seq.seq_id for seq in self.engine.scheduler.running}

    def _check_places(self, entered: set[int], left: tuple[int, ...]) -> None:
        """Whoever leaves in a step in which others enter has made room for a sooner priority."""
        for seq_id in left if entered else ():
            sooner = [one for one in entered if self.priorities[one] < self.priorities[seq_id]]
            assert sooner, f"{seq_id} gave way to none of {entered} ({self.priorities})"
            self.tally.displacements += 1

    def _most_steps(self) -> int:
        """A step computes a token at least, and a sequence is computed three times at most.

        Where memory runs out, that is once more for some.
        One ahead, every other step may find no room, and wait for the one in flight.
        """
        scheduler = self.engine.scheduler
        tokens = [
            seq.num_tokens + seq.remaining_output_tokens(self.limits.context)
            for seq in (*scheduler.running, *scheduler.waiting)
        ]
        return (8 if self.limits.is_ahead else 4) * sum(tokens) + 10

    def _pick(self, which: int) -> int:
        return 1 + which % self.num_ids


class BreakableDecoder(OracleDecoder):
    """An oracle whose next forward can be made to fail for one sequence."""

    _victim: Sequence | None = None
    _is_late = False
    _has_no_memory = False
    _found_no_memory = False
    _named: int | None = None  # by a forward that failed

    def break_for(self, seq: Sequence, is_late: bool) -> None:
        """Let the next forward fail, before or after it wrote into the cache, if it is for this."""
        self._victim, self._is_late = seq, is_late

    def run_out(self) -> None:
        """Let the next forward of more than one token find no memory, halfway through."""
        self._has_no_memory = True

    def ran_out(self) -> bool:
        """Whether a forward found no memory since this was asked last."""
        had_none, self._found_no_memory = self._found_no_memory, False
        return had_none

    def mend(self) -> int | None:
        """Go on without a fault; return whom the last forward named, if it failed."""
        named, self._victim, self._named = self._named, None, None
        return named

    def forward(self, batch: PackedBatch, backend: AttentionBackend) -> torch.Tensor:
        if self._has_no_memory and batch.num_tokens > 1:
            self._has_no_memory, self._found_no_memory = False, True
            super().forward(batch, backend)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if self._victim is None or self._victim.status is not SequenceStatus.RUNNING:
            return super().forward(batch, backend)
        if self._is_late:
            super().forward(batch, backend)
        self._named = self._victim.seq_id
        raise EngineStepError("it cannot be computed", (self._named,))


def _make_engine(limits: Limits, decoder: OracleDecoder) -> Engine:
    engine = make_engine(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.budget,
        reserve=limits.reserve,
        enable_prefix_caching=limits.caching,
        decoder=decoder,
        samples_in_lists=limits.is_fast,
        one_ahead=limits.is_ahead,
        capture=FakeCapture() if limits.has_graphs else None,
    )
    if limits.is_hopeful:  # many answers left after one token of those that they might have
        short = Sequence(request(1, [1, 2], num_prompt_tokens=1, max_tokens=50), arrival=0)
        for _ in range(100):
            engine.scheduler.admission.learn_from(short)
    return engine
