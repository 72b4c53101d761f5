"""The engine: a request's life between two channels, one step at a time.

Single-threaded; everything here and below is touched by the thread that calls ``step``. No torch:
what runs the tensors is the Runner, so the same engine drives a model or a test's oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ReadOnlyList
from time import perf_counter
from typing import TypeVar

from headrace_worker.engine.errors import EngineStepError, StepTooLarge
from headrace_worker.engine.grammar_compiler import GrammarCompiler, GrammarRefusal
from headrace_worker.engine.messages import (
    AddSequence,
    PromptLogprobs,
    SampledToken,
    SequenceFailure,
    SequenceFinish,
    StepOutcome,
)
from headrace_worker.engine.running import RowResult, Runner, check_answers
from headrace_worker.engine.schedule import Schedule, ScheduledSequence
from headrace_worker.engine.scheduler import Scheduler
from headrace_worker.engine.sequence import Sequence
from headrace_worker.engine.step_limits import can_be_halved
from headrace_worker.engine.vocabulary import refuse_unknown_tokens

__all__ = ["Engine", "RowResult", "Runner"]

T = TypeVar("T")


class Engine:
    """Adds, aborts and steps sequences; answers each step with one outcome."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        vocab_size: int,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.grammars = grammars  # None: a sequence that brings one is refused
        # Told before a step who has no share in it, when that has changed; None: nobody asks.
        self.on_bystanders: Callable[[tuple[int, ...]], None] | None = None
        self.num_steps = 0
        self.adds_seen = 0  # AddSequence commands so far
        self.runner = runner
        self._vocab_size = vocab_size
        self._sequences: dict[int, Sequence] = {}  # waiting for a grammar, waiting, running
        self._without_grammar: set[int] = set()  # seq_ids of those that wait for theirs
        self._finished: list[tuple[int, SequenceFinish]] = []  # not reported yet
        self._failed: list[SequenceFailure] = []  # not reported yet
        self._has_freed_blocks = False  # by an abort; not reported yet
        # A step that found no memory, and what the device said; None: there is none to deal with.
        self._too_large: tuple[list[ScheduledSequence], StepTooLarge] | None = None
        self._sent_back: list[Sequence] = []  # for want of memory; not reported yet
        self._bystanders: tuple[int, ...] = ()  # as told last

    @property
    def has_work(self) -> bool:
        """Whether a step would do or report anything."""
        has_news = self._finished or self._failed or self._has_freed_blocks
        return bool(len(self._sequences) > len(self._without_grammar) or has_news)

    def add(self, command: AddSequence) -> None:
        """Take a sequence in; if it can never run, or is over already, the next outcome says so.

        An id that is already here is ignored, so a command may be repeated.
        """
        self.adds_seen += 1
        if command.seq_id in self._sequences:
            return
        seq = Sequence(command, arrival=self.adds_seen, arrival_step=self.num_steps)
        refused = refuse_unknown_tokens(seq, self._vocab_size)
        if failure := refused or self.scheduler.admission.refusal(seq):
            self._failed.append(failure)
        elif command.sampling.grammar is not None:
            self._submit_grammar(seq, command.sampling.grammar)
        else:
            self._enter(seq)

    def take_grammars(self) -> None:
        """Let in the sequences whose grammars are compiled; the others go on waiting for theirs."""
        for seq_id, grammar in self.grammars.take() if self.grammars else ():
            self._without_grammar.remove(seq_id)
            seq = self._sequences.pop(seq_id)
            if isinstance(grammar, GrammarRefusal):
                self._failed.append(SequenceFailure(seq_id, grammar.code, grammar.message))
            else:
                seq.follow(grammar)
                self._enter(seq)

    def abort(self, seq_ids: Iterable[int]) -> None:
        """Drop sequences in any state and free their blocks; unknown ids are ignored."""
        for seq_id in seq_ids:
            if seq := self._sequences.pop(seq_id, None):
                # Most often it said a stop string, which only the other process can see.
                self.scheduler.admission.learn_from(seq)
                self._has_freed_blocks = True
                if self.grammars and seq_id in self._without_grammar:
                    self._without_grammar.remove(seq_id)
                    self.grammars.cancel(seq_id)
                else:
                    self.scheduler.remove(seq)

    def reprioritise(self, seq_id: int, priority: int) -> None:
        """Serve a sequence sooner or later from the next step on; an unknown id is ignored."""
        if seq := self._sequences.get(seq_id):
            self.scheduler.reprioritise(seq, priority)

    def step(self) -> StepOutcome:
        """Schedule → forward and sample → commit; one outcome.

        Raises EngineStepError with the sequences of the batch when the runner is broken.
        """
        started_s = perf_counter()
        self.num_steps += 1
        schedule = self.scheduler.schedule()
        scheduled = schedule.in_batch_order()
        self._tell_bystanders(scheduled)
        results: list[RowResult] | None = []
        if scheduled:
            results = self._attempt(self.runner.execute, scheduled)
        told = self._commit(scheduled, results)
        self._make_room(is_alone=True)
        return self._outcome(schedule, told, started_s)

    def _outcome(
        self, schedule: Schedule, results: list[RowResult], started_s: float
    ) -> StepOutcome:
        """Tell what was scheduled and what came of rows, and all that has happened since."""
        num_new_tokens = [share.num_new_tokens for share in schedule.scheduled.values()]
        finished, self._finished = self._finished, []
        failed, self._failed = self._failed, []
        sent_back, self._sent_back = self._sent_back, []
        self._has_freed_blocks = False
        return StepOutcome(
            step=self.num_steps,
            tokens=tuple(result for result in results if isinstance(result, SampledToken)),
            finished=tuple(finished),
            failed=tuple(failed),
            admitted=tuple((seq.seq_id, seq.num_cached_tokens) for seq in schedule.admitted),
            preempted=tuple(seq.seq_id for seq in (*schedule.preempted, *sent_back)),
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            free_blocks=self.scheduler.admission.claimable_blocks(self._sequences.values()),
            num_blocks=self.scheduler.pool.num_blocks,
            num_scheduled_tokens=sum(num_new_tokens),
            num_prefill_tokens=sum(count for count in num_new_tokens if count > 1),
            num_scheduled_seqs=len(num_new_tokens),
            adds_seen=self.adds_seen,
            step_s=perf_counter() - started_s,
            prompt_logprobs=tuple(told for told in results if isinstance(told, PromptLogprobs)),
        )

    def _tell_bystanders(
        self, scheduled: list[ScheduledSequence], in_flight: Iterable[Sequence] = ()
    ) -> None:
        if self.on_bystanders is None:
            return
        in_step = {share.seq.seq_id for share in scheduled}
        in_step.update(seq.seq_id for seq in in_flight)
        here = (seq.seq_id for seq in (*self.scheduler.running, *self.scheduler.waiting))
        bystanders = tuple(seq_id for seq_id in here if seq_id not in in_step)
        if bystanders != self._bystanders:
            self._bystanders = bystanders
            self.on_bystanders(bystanders)

    def _enter(self, seq: Sequence) -> None:
        seq.ended = seq.finish_reason(self.scheduler.admission.max_model_len)
        if seq.ended and not seq.num_unscored_tokens:
            self._finished.append((seq.seq_id, seq.ended))
        else:
            self._sequences[seq.seq_id] = seq
            self.scheduler.add(seq)

    def _submit_grammar(self, seq: Sequence, grammar: str) -> None:
        if self.grammars is None:
            message = "this engine was started without a tokenizer, which grammars need"
            self._failed.append(SequenceFailure(seq.seq_id, "invalid_request", message))
            return
        # Blocks are promised to it from now on; the scheduler hears of it when it can run.
        self._sequences[seq.seq_id] = seq
        self._without_grammar.add(seq.seq_id)
        self.grammars.submit(seq.seq_id, grammar, tuple(seq.token_ids[seq.num_prompt_tokens :]))

    def _attempt(
        self,
        run: Callable[[ReadOnlyList[ScheduledSequence]], T],
        scheduled: list[ScheduledSequence],
    ) -> T | None:
        """Have the runner do something with a step; None when the step did not happen."""
        try:
            return run(scheduled)
        except StepTooLarge as error:
            self._too_large = (scheduled, error)
            return None
        except EngineStepError as error:
            if len(error.sequence_ids) != 1:
                raise
            self._fail(SequenceFailure(error.sequence_ids[0], "engine_failure", str(error)))
            return None
        except Exception as error:  # the step boundary: whatever it is, say who was in the batch
            raise self._breakdown(error, [share.seq for share in scheduled]) from error

    def _make_room(self, *, is_alone: bool) -> None:
        """After a step that found no memory, make the next smaller; nothing may be in flight.

        One token of one sequence is the smallest there is. It fails, if nothing else was on the
        device (``is_alone``); else it gets another try.
        """
        if self._too_large is None:
            return
        (shares, error), self._too_large = self._too_large, None
        if is_alone and not can_be_halved(shares):
            message = f"out of memory with one token of this request alone: {error}"
            self._fail(SequenceFailure(shares[0].seq.seq_id, "engine_failure", message))
        else:
            self._sent_back += self.scheduler.shrink(shares)

    def _breakdown(self, error: Exception, seqs: Iterable[Sequence]) -> EngineStepError:
        seq_ids = dict.fromkeys(seq.seq_id for seq in seqs)
        return EngineStepError(f"{type(error).__name__}: {error}", tuple(seq_ids))

    def _commit(
        self, scheduled: list[ScheduledSequence], results: list[RowResult] | None
    ) -> list[RowResult]:
        if results is None:  # the step did not happen
            return []
        sampling = {share.seq.seq_id for share in scheduled if share.samples}
        self.scheduler.commit(scheduled)
        for result in results:
            self._take(self._sequences[result.seq_id], result)
        check_answers(sampling, results)
        return results

    def _take(self, seq: Sequence, result: RowResult) -> None:
        match result:
            case SequenceFailure():
                if not self._renew_grammar(seq):
                    self._fail(result)
            case PromptLogprobs():
                self._take_scores(seq, len(result.scores))
            case SampledToken():
                self._take_token(seq, result.token_id)

    def _take_scores(self, seq: Sequence, num_scores: int) -> None:
        seq.num_scored_tokens += num_scores
        if seq.ended and not seq.num_unscored_tokens:
            self._finish(seq, seq.ended)

    def _take_token(self, seq: Sequence, token_id: int) -> None:
        seq.token_ids.append(token_id)
        if seq.grammar is not None and not seq.grammar.accept(token_id):
            message = f"the grammar cannot go on after token {token_id}: {seq.grammar.error}"
            if not self._renew_grammar(seq):
                self._fail(SequenceFailure(seq.seq_id, "invalid_request", message))
            return
        if reason := seq.finish_reason(self.scheduler.admission.max_model_len):
            self._finish(seq, reason)

    def _renew_grammar(self, seq: Sequence) -> bool:
        """Have a grammar that failed compiled again: others may have used up the room it shares.

        It goes on when it is ready, as after a preemption. Each time has to bring it a token
        further, so one that has no room alone fails.
        """
        grammar, renewed_at = seq.sampling.grammar, seq.grammar_renewed_at
        if not grammar or not self.grammars or not seq.grammar or not seq.grammar.error:
            return False
        if renewed_at is not None and seq.num_output_tokens <= renewed_at:
            return False
        seq.grammar_renewed_at = seq.num_output_tokens
        self.grammars.forget(grammar)
        self.scheduler.withdraw(seq)
        self._submit_grammar(seq, grammar)
        return True

    def _finish(self, seq: Sequence, reason: SequenceFinish) -> None:
        self._finished.append((seq.seq_id, reason))
        self.scheduler.admission.learn_from(seq)
        self.scheduler.remove(self._sequences.pop(seq.seq_id))

    def _fail(self, failure: SequenceFailure) -> None:
        self._failed.append(failure)
        is_poisoned = failure.code == "engine_failure"  # what was computed cannot be trusted
        self.scheduler.remove(self._sequences.pop(failure.seq_id), is_poisoned=is_poisoned)
