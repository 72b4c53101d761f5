"""Listens to an engine over the oracle as its users do, and accepts only the right answers."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_worker.engine.messages import (
    AddSequence,
    PromptLogprobs,
    SampledToken,
    SequenceFinish,
    StepOutcome,
    TokenScore,
)
from support.oracle_answer import finish_reason, is_near_tie, log_softmax, next_token
from support.oracle_limits import Limits, Tally
from support.oracle_model import exact_logits

_TOLERANCE = 1e-4  # of a log-probability


@dataclass(slots=True)
class Tracked:
    """One sequence as its user sees it."""

    command: AddSequence
    token_ids: list[int]  # those that it came with, then those that were told
    num_scores: int = 0  # of its prompt, told so far
    is_over: bool = False  # finished, failed or aborted
    is_bad: bool = False  # failed: what it computed must serve nobody

    @property
    def owed_scores(self) -> int:
        """Scores of its prompt that are still to come."""
        if self.command.sampling.prompt_logprobs is None:
            return 0
        return self.command.num_prompt_tokens - 1 - self.num_scores


class Witness:
    """Compares what an engine tells with what the requests must get."""

    def __init__(self, limits: Limits, tally: Tally) -> None:
        self.limits = limits
        self.tally = tally
        self.tracked: dict[int, Tracked] = {}

    def add(self, command: AddSequence) -> None:
        """A sequence was given to the engine."""
        self.tracked[command.seq_id] = Tracked(command, list(command.token_ids))
        self.tally.sequences += 1

    def abort(self, seq_id: int) -> None:
        """A sequence was dropped: nothing more may be told of it."""
        self.tracked[seq_id].is_over = True
        self.tally.aborts += 1

    def is_here(self, seq_id: int) -> bool:
        """Whether the engine has a sequence; one that was over on arrival is only reported."""
        seq = self.tracked[seq_id]
        return not seq.is_over and (self._reason(seq) is None or seq.owed_scores > 0)

    def live(self) -> list[int]:
        """Return the ids of the sequences that still have to say something."""
        return [seq_id for seq_id, seq in self.tracked.items() if not seq.is_over]

    def take(self, outcome: StepOutcome, named: int | None = None) -> None:
        """Check all that one step says; ``named`` is the sequence that the step failed for."""
        self.tally.steps += 1
        self.tally.preemptions += len(outcome.preempted)
        for seq_id, num_cached in outcome.admitted:
            self._check_cached(seq_id, num_cached)
        for part in outcome.prompt_logprobs:
            self._check_scores(part)
        assert len({token.seq_id for token in outcome.tokens}) == len(outcome.tokens)
        for token in outcome.tokens:
            self._check_token(token)
        for seq_id, reason in outcome.finished:
            self._check_finish(seq_id, reason)
        for failure in outcome.failed:
            self._check_failure(failure.seq_id, failure.code, named)
        for seq_id in outcome.preempted:  # it had left the batch before the step could spoil it
            self.tracked[seq_id].is_bad = False
        late = [seq_id for seq_id in self.live() if not self.is_here(seq_id)]
        assert not late, f"{late} are over, and nobody was told"

    def _check_scores(self, part: PromptLogprobs) -> None:
        """Each prompt token but the first is scored once, in order, before there is an answer."""
        seq = self._live(part.seq_id)
        count = seq.command.sampling.prompt_logprobs
        assert count is not None, f"sequence {part.seq_id} wanted no scores"
        assert part.scores
        for place, score in enumerate(part.scores, start=part.start):
            seq.num_scores += 1
            assert place == seq.num_scores < seq.command.num_prompt_tokens
            assert score.token_id == seq.token_ids[place]
            assert seq.token_ids[place - 1] != self.limits.poison, "a score of a poisoned row"
            _check_score(score, seq.token_ids[:place], count)
        self.tally.scores += len(part.scores)

    def _check_token(self, token: SampledToken) -> None:
        seq = self._live(token.seq_id)
        assert not seq.owed_scores, "an answer before the scores of its prompt"
        assert seq.token_ids[-1] != self.limits.poison, "a token out of a poisoned row"
        expected = next_token(seq.command, seq.token_ids)
        if token.token_id != expected:
            told = f"sequence {token.seq_id} got {token.token_id} after {seq.token_ids}"
            is_fair = is_near_tie(seq.command, seq.token_ids, token.token_id)
            assert is_fair, f"{told}, not {expected}"
            self.tally.near_ties += 1
        if not self.limits.is_fast:
            _check_logprobs(seq, token)
        seq.token_ids.append(token.token_id)
        self.tally.tokens += 1

    def _check_finish(self, seq_id: int, reason: SequenceFinish) -> None:
        seq = self._live(seq_id)
        assert reason is self._reason(seq)
        assert not seq.owed_scores
        seq.is_over = True

    def _check_failure(self, seq_id: int, code: str, named: int | None) -> None:
        seq = self._live(seq_id)
        assert code == "engine_failure"
        assert seq_id == named or self._is_poisoned(seq), f"{seq_id} failed without a cause"
        seq.is_over = seq.is_bad = True
        self.tally.breakdowns += 1

    def _is_poisoned(self, seq: Tracked) -> bool:
        """Whether the row to sample from is NaN, or one to score from."""
        scored = seq.token_ids[seq.num_scores : seq.num_scores + seq.owed_scores]
        return self.limits.poison in (seq.token_ids[-1], *scored)

    def _check_cached(self, seq_id: int, num_cached: int) -> None:
        """What was found in the cache was computed for equal tokens of the same tenant."""
        own = self._live(seq_id)
        assert num_cached <= own.command.num_prompt_tokens
        if num_cached == 0:
            return
        self.tally.cached_sequences += 1
        assert self.limits.caching
        assert not own.owed_scores, "cached tokens have no logits to score from"
        assert any(
            other.token_ids[:num_cached] == own.token_ids[:num_cached]
            for other in self.tracked.values()
            if other is not own and not other.is_bad and other.command.salt == own.command.salt
        ), f"{num_cached} tokens of sequence {seq_id} were found, and nobody computed them"

    def _reason(self, seq: Tracked) -> SequenceFinish | None:
        return finish_reason(seq.command, seq.token_ids, self.limits.context)

    def _live(self, seq_id: int) -> Tracked:
        seq = self.tracked[seq_id]
        assert not seq.is_over, f"sequence {seq_id} was over, and more was said of it"
        return seq


def _check_logprobs(seq: Tracked, token: SampledToken) -> None:
    """The model's own: of the row before anything was changed in it."""
    count = seq.command.sampling.logprobs
    if count is None:
        assert token.logprob is None
        assert token.top_logprobs == ()
        return
    assert token.logprob is not None
    score = TokenScore(token.token_id, token.logprob, token.top_logprobs)
    _check_score(score, seq.token_ids, count)


def _check_score(score: TokenScore, before: list[int], count: int) -> None:
    expected = log_softmax(exact_logits(before))
    best = sorted(range(len(expected)), key=lambda token_id: -expected[token_id])[:count]
    assert [token_id for token_id, _ in score.top_logprobs] == best
    pairs = [(score.token_id, score.logprob), *score.top_logprobs]
    assert all(abs(value - expected[token_id]) < _TOLERANCE for token_id, value in pairs)
