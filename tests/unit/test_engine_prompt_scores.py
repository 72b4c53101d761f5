"""Prompt log-probabilities: each prompt token but the first is scored once, on any schedule."""

from __future__ import annotations

import pytest
import torch

from headrace_worker.engine.engine import Engine
from headrace_worker.engine.messages import AddSequence, SequenceFinish, TokenScore
from headrace_worker.engine.scores import MAX_ROWS, score_tokens
from support.oracle import Answers, OracleDecoder, make_engine, request, run, solo
from support.oracle_model import exact_logits

NO_REASON_TO_END = 10_000


def long_prompt(seq_id: int, length: int) -> list[int]:
    """Tokens that differ from sequence to sequence."""
    return [(seq_id * 11 + i * i) % 59 for i in range(length)]


def true_scores(command: AddSequence) -> list[TokenScore]:
    """Score each prompt token by what the oracle says of those before it, one at a time."""
    prompt = command.token_ids[: command.num_prompt_tokens]
    rows = torch.tensor([exact_logits(prompt[:place]) for place in range(1, len(prompt))])
    wanted = [command.sampling.prompt_logprobs or 0] * len(rows)
    return [*score_tokens(rows, prompt[1:], wanted)]


def told_scores(answers: Answers, seq_id: int) -> list[TokenScore]:
    """Return the scores of a prompt; each place must be told once, in order."""
    scores: list[TokenScore] = []
    for outcome in answers.outcomes:
        for part in outcome.prompt_logprobs:
            if part.seq_id == seq_id:
                assert part.start == len(scores) + 1
                scores += part.scores
    return scores


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_every_prompt_token_but_the_first_is_scored_once_in_any_chunks(chunk: int) -> None:
    """Beside another request, with the k best; and the answer is the one without scores."""
    command = request(1, long_prompt(1, 33), prompt_logprobs=3)
    other = request(2, long_prompt(2, 20))
    answers = run(make_engine(max_num_batched_tokens=chunk), command, other)
    assert told_scores(answers, 1) == true_scores(command)
    assert told_scores(answers, 2) == []
    assert answers.tokens == {1: solo(request(1, long_prompt(1, 33))), 2: solo(other)}


def test_scores_come_with_the_first_token_at_the_latest() -> None:
    """Whoever has an answer's first token has the whole prompt's scores."""
    command = request(1, long_prompt(1, 33), prompt_logprobs=0)
    answers = run(make_engine(max_num_batched_tokens=7), command)
    first = next(index for index, outcome in enumerate(answers.outcomes) if outcome.tokens)
    assert all(outcome.prompt_logprobs for outcome in answers.outcomes[: first + 1])
    assert not any(outcome.prompt_logprobs for outcome in answers.outcomes[first + 1 :])


def test_the_same_prompt_twice_has_the_same_scores() -> None:
    """A cached prefix has no logits, so the second computes its own: 33 entries again (B29)."""
    engine = make_engine()
    commands = [request(i, long_prompt(1, 33), prompt_logprobs=2) for i in (1, 2)]
    first, second = (run(engine, command) for command in commands)
    assert [None, *told_scores(first, 1)] == [None, *told_scores(second, 2)]
    assert len(told_scores(second, 2)) == 32
    assert second.outcomes[0].admitted == ((2, 0),)


def test_a_scored_prompt_is_cached_for_those_that_want_no_scores() -> None:
    """And what they left in the cache is not read by one that does (B29)."""
    engine = make_engine()
    run(engine, request(1, long_prompt(1, 33), prompt_logprobs=2))
    unscored = run(engine, request(2, long_prompt(1, 33)))
    assert unscored.outcomes[0].admitted == ((2, 32),)
    scored = request(3, long_prompt(1, 33), prompt_logprobs=2)
    answers = run(engine, scored)
    assert told_scores(answers, 3) == true_scores(scored)
    assert answers.tokens[3] == unscored.tokens[2]


def preempt_between_scores(command: AddSequence) -> tuple[Engine, Answers]:
    """Send a sequence back to waiting in the middle of its prompt, after some scores were told."""
    engine, answers = make_engine(max_num_batched_tokens=8), Answers()
    engine.add(command)
    answers.take(engine.step())
    scheduler = engine.scheduler
    scheduler._preempt(scheduler.running[0], scheduler.schedule())
    assert 0 < len(told_scores(answers, command.seq_id)) < command.num_prompt_tokens - 1
    return engine, answers


@pytest.mark.parametrize("length", [10, 16, 17, 33])
def test_a_preempted_prompt_goes_on_with_the_score_that_is_next(length: int) -> None:
    """It may reuse its own blocks up to there, and tells nothing twice."""
    command = request(1, long_prompt(1, length), prompt_logprobs=1)
    engine, answers = preempt_between_scores(command)
    before = [part.start for part in answers.outcomes[0].prompt_logprobs]
    while engine.has_work:
        answers.take(engine.step())
    assert before == [1]
    assert told_scores(answers, 1) == true_scores(command)
    assert answers.tokens[1] == solo(command)


def test_sequences_preempted_by_a_short_pool_tell_no_score_twice() -> None:
    """Six requests in a pool for three, all of them scored."""
    commands = [
        request(i, long_prompt(i, 6), max_tokens=14, prompt_logprobs=1) for i in range(1, 7)
    ]
    answers = run(make_engine(num_blocks=11), *commands)
    assert answers.num_preemptions >= 1
    assert all(told_scores(answers, c.seq_id) == true_scores(c) for c in commands)


def test_a_resumed_sequence_has_its_prompt_scored_but_not_its_output() -> None:
    """Another worker tells the scores again: the first one's died with it."""
    prompt = long_prompt(1, 9)
    whole = solo(request(1, prompt, max_tokens=12))
    resumed = request(1, prompt + whole[:7], num_prompt_tokens=9, max_tokens=12, prompt_logprobs=1)
    answers = run(make_engine(max_num_batched_tokens=5), resumed)
    assert told_scores(answers, 1) == true_scores(request(1, prompt, prompt_logprobs=1))
    assert answers.tokens[1] == whole[7:]


def test_a_resumed_sequence_that_was_over_still_gets_its_scores() -> None:
    """The worker died before the finish: scores, no token, and the same finish."""
    resumed = request(
        1, [*long_prompt(1, 9), 4, 5], num_prompt_tokens=9, max_tokens=2, prompt_logprobs=1
    )
    engine = make_engine(max_num_batched_tokens=4)
    answers = run(engine, resumed)
    assert told_scores(answers, 1) == true_scores(resumed)
    assert (answers.tokens, answers.finished) == ({}, {1: SequenceFinish.LENGTH})
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def test_a_prompt_of_one_token_has_no_scores() -> None:
    """Nothing predicts the first token."""
    answers = run(make_engine(), request(1, [5], prompt_logprobs=2))
    assert told_scores(answers, 1) == []
    assert answers.tokens[1] == solo(request(1, [5]))


def test_a_prompt_row_of_nan_fails_that_request_alone() -> None:
    """Its neighbour gets its own scores and tokens, and its blocks serve nobody (B29)."""
    broken = request(1, [*long_prompt(1, 9), 60, *long_prompt(3, 9)], prompt_logprobs=1)
    sound = request(2, long_prompt(2, 20), prompt_logprobs=1)
    engine = make_engine(decoder=OracleDecoder(nan_after=60), max_num_batched_tokens=12)
    answers = run(engine, broken, sound)
    assert "prompt token 10" in answers.failed[1].message
    assert (told_scores(answers, 2), answers.tokens) == (true_scores(sound), {2: solo(sound)})
    again = run(engine, request(3, list(broken.token_ids)))
    assert again.outcomes[0].admitted == ((3, 0),)


def test_a_request_that_fails_in_its_prompts_last_chunk_fails_once() -> None:
    """It was to be scored and sampled in that step, and has one end."""
    decoder = OracleDecoder(nan_after=60)
    answers = run(make_engine(decoder=decoder), request(1, [60, 1, 60], prompt_logprobs=1))
    assert list(answers.failed) == [1]
    assert answers.tokens == {}


def test_scores_are_over_the_tokens_that_can_be_sampled() -> None:
    """Padding beyond the tokenizer has no share, and in a prompt no likelihood (B24)."""
    engine = make_engine(decoder=OracleDecoder(bias={63: 100.0}), sampled_vocab_size=62)
    first, second = told_scores(run(engine, request(1, [1, 2, 63], prompt_logprobs=64)), 1)
    assert max(token_id for token_id, _ in first.top_logprobs) == 61
    assert second.logprob == pytest.approx(-9999)


class CountingDecoder(OracleDecoder):
    """Remembers how many rows of logits were asked for at once."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the oracle's."""
        self.num_rows = [*getattr(self, "num_rows", ()), len(hidden)]
        return super().logits(hidden)


def test_the_logits_of_a_long_prompt_are_never_there_at_once() -> None:
    """A chunk is scored in slices; who asks for nothing costs nothing."""
    decoder = CountingDecoder()
    engine = make_engine(decoder=decoder, max_model_len=512, max_num_batched_tokens=512)
    prompt = long_prompt(1, 3 * MAX_ROWS)
    run(engine, request(1, prompt, max_tokens=1))
    assert decoder.num_rows == [1]
    command = request(2, prompt, max_tokens=1, prompt_logprobs=0)
    assert told_scores(run(engine, command), 2) == true_scores(command)
    assert decoder.num_rows == [1, MAX_ROWS, MAX_ROWS, MAX_ROWS - 1, 1]
