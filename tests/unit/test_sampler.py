"""The sampler applies what a request asked for to its own row, and to no other."""

from __future__ import annotations

import math

import pytest
import torch

from headrace_worker.engine.adjust import adjust_logits
from headrace_worker.engine.messages import SampledToken, SequenceFailure
from headrace_worker.engine.sampler import sample
from headrace_worker.engine.scores import LOGPROB_FLOOR
from headrace_worker.engine.sequence import Sequence
from support.oracle import request

LOGITS = [1.0, 4.0, 3.0, 2.0, 0.0]


def make(
    prompt: list[int] | None = None, output: list[int] | None = None, **sampling: object
) -> Sequence:
    """Build a sequence whose next token is due."""
    prompt, output = prompt or [0], output or []
    command = request(7, prompt + output, num_prompt_tokens=len(prompt), **sampling)  # type: ignore[arg-type]
    return Sequence(command, arrival=1)


def next_token(seq: Sequence, logits: list[float] | None = None) -> SampledToken:
    """Sample one row."""
    (result,) = sample(torch.tensor([logits or LOGITS]), [seq])
    assert isinstance(result, SampledToken), result
    return result


def test_greedy_takes_the_most_likely_token_and_the_lowest_id_of_equals() -> None:
    """Temperature 0 is argmax."""
    assert next_token(make()).token_id == 1
    assert next_token(make(), [2.0, 5.0, 5.0]).token_id == 1


@pytest.mark.parametrize(
    "sampling",
    [{}, {"logprobs": 2}, {"logit_bias": ((3, 0.7),)}, {"temperature": 0.8, "seed": 4}],
)
def test_logits_in_half_the_bits_are_what_they_are_in_float32(sampling: dict[str, object]) -> None:
    """Whatever computes on a row does so in float32; a token, its scores and failures are equal."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 300, generator=generator).bfloat16()
    logits[2, 7] = float("nan")
    seqs = [make(), make(**sampling), make(), make()]
    assert sample(logits, seqs) == sample(logits.float(), seqs)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1e-4},
        {"temperature": 1e-30},
        {"temperature": 1.0, "top_p": 1e-4},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "min_p": 1.0},
    ],
)
def test_tiny_temperature_or_top_p_equals_greedy(sampling: dict[str, float]) -> None:
    """No overflow, no NaN, and never the unfiltered distribution (B18, B19)."""
    for seed in range(50):
        assert next_token(make(seed=seed, **sampling)).token_id == 1


def test_a_huge_top_k_is_the_whole_vocabulary() -> None:
    """top_k beyond the vocabulary is clamped and changes nothing (B23)."""
    for seed in range(20):
        huge = next_token(make(seed=seed, temperature=1.0, top_k=10**7)).token_id
        assert huge == next_token(make(seed=seed, temperature=1.0)).token_id


def test_a_logit_bias_moves_its_token() -> None:
    """The bias is added before anything else."""
    assert next_token(make(logit_bias=((4, 5.0), (1, -0.5)))).token_id == 4


def test_the_repetition_penalty_counts_prompt_and_output() -> None:
    """Both positive and negative logits get less likely, wherever the token appeared (B26)."""
    assert next_token(make([1], repetition_penalty=2.0)).token_id == 2
    assert next_token(make([0], [1], repetition_penalty=2.0)).token_id == 2
    assert next_token(make([0], repetition_penalty=4.0), [-0.5, -1.0]).token_id == 1


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_presence_and_frequency_count_output_only(penalty: str) -> None:
    """A token of the prompt is not penalized, the same token in the output is (B26)."""
    assert next_token(make([1], **{penalty: 1.5})).token_id == 1
    assert next_token(make([0], [1], **{penalty: 1.5})).token_id == 2


def test_frequency_grows_with_each_appearance_and_presence_does_not() -> None:
    """Twice in the output: frequency subtracts twice, presence once."""
    assert next_token(make([0], [1, 1], frequency_penalty=0.6)).token_id == 2
    assert next_token(make([0], [1, 1], presence_penalty=0.6)).token_id == 1


def test_penalties_do_not_depend_on_which_epoch_made_the_output() -> None:
    """What is prompt and what is output does not move with a takeover (B26)."""
    resumed = make([0], [1], presence_penalty=1.5)
    fresh = make([0], presence_penalty=1.5)
    fresh.token_ids.append(1)
    assert next_token(resumed).token_id == next_token(fresh).token_id == 2


def test_stop_tokens_are_masked_until_min_tokens() -> None:
    """Every stop token is out before that many tokens, and in afterwards (B27)."""
    assert next_token(make([0], [3], stop_token_ids=(1, 2), min_tokens=2)).token_id == 3
    assert next_token(make([0], [3, 3], stop_token_ids=(1, 2), min_tokens=2)).token_id == 1


def test_a_stop_token_outside_the_vocabulary_is_ignored() -> None:
    """A padded tokenizer's end token does not break the row."""
    assert next_token(make(stop_token_ids=(1, 999), min_tokens=2)).token_id == 2


@pytest.mark.parametrize(
    "sampling",
    [
        {"stop_token_ids": (0, 1, 2, 3, 4), "min_tokens": 2},
        {"bad_words": ((0,), (1,), (2,), (3,), (4,))},
        {"repetition_penalty": 1e-39},
    ],
)
def test_a_request_that_leaves_nothing_to_choose_fails_by_its_own_fault(
    sampling: dict[str, object],
) -> None:
    """When everything is masked, or a penalty overflows, it is not called a fault of the engine."""
    (result,) = sample(torch.tensor([LOGITS]), [make([0, 1], **sampling)])
    assert isinstance(result, SequenceFailure)
    assert result.code == "invalid_request"


def test_a_mask_over_a_nan_does_not_hide_it() -> None:
    """The row is the model's fault, whichever of its tokens the request had ruled out."""
    (result,) = sample(torch.tensor([[1.0, math.nan, 2.0]]), [make(bad_words=((1,),))])
    assert isinstance(result, SequenceFailure)
    assert result.code == "engine_failure"


@pytest.mark.parametrize(
    ("output", "expected"),
    [([], 1), ([3], 2), ([2, 3], 3), ([3, 2, 3], 3), ([2, 3, 4], 1)],
)
def test_a_bad_word_is_masked_where_it_would_end(output: list[int], expected: int) -> None:
    """Only the last token of a run is out, and only after the others: 3 1, and 2 3 2."""
    seq = make([0], output, bad_words=((3, 1), (2, 3, 2)))
    assert next_token(seq).token_id == expected


def test_a_bad_word_of_one_token_is_always_masked() -> None:
    """It needs no beginning; one outside the vocabulary is passed over."""
    for output in ([], [1], [3, 3, 3]):
        assert next_token(make([0], output, bad_words=((1,), (999,)))).token_id == 2


def test_a_bad_word_that_began_in_the_prompt_is_none() -> None:
    """Only the output must not hold it: the prompt's last token does not count."""
    assert next_token(make([3], bad_words=((3, 1),))).token_id == 1
    assert next_token(make([0], [3], bad_words=((3, 1),))).token_id == 2


def test_bias_comes_before_the_penalty_and_masks_come_last() -> None:
    """A biased logit is what the penalty divides, and no bias brings a masked token back."""
    biased = make([1], logit_bias=((1, 2.0),), repetition_penalty=2.5)  # (4 + 2) / 2.5 < 3
    assert next_token(biased).token_id == 2
    masked = make(stop_token_ids=(4,), min_tokens=1, bad_words=((3,),))
    rows = torch.tensor([LOGITS])
    assert next_token(make(logit_bias=((3, 100.0),), bad_words=((3,),))).token_id == 1
    assert adjust_logits(rows, [masked]).tolist() == [[1, 4, 3, -math.inf, -math.inf]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_finite_maximum_fails_alone(value: float) -> None:
    """The neighbours get the tokens they would have got without it."""
    logits = torch.tensor([LOGITS, [value] * 5, LOGITS])
    seqs = [make(temperature=1.0, seed=seed, logprobs=1) for seed in (1, 2, 3)]
    first, broken, third = sample(logits.clone(), seqs)
    assert isinstance(broken, SequenceFailure)
    assert broken.code == "engine_failure"
    assert [first, third] == sample(logits[[0, 2]], [seqs[0], seqs[2]])


def test_one_nan_in_a_row_is_enough_to_fail_it() -> None:
    """A single bad logit means that the row cannot be trusted."""
    (result,) = sample(torch.tensor([[1.0, math.nan, 2.0]]), [make()])
    assert isinstance(result, SequenceFailure)


def test_a_masked_vocabulary_is_no_failure() -> None:
    """Minus infinity for some tokens just means that they are out."""
    for seed in range(20):
        logits = [-math.inf, 1.0, -math.inf]
        assert next_token(make(temperature=1.0, seed=seed), logits).token_id == 1


def test_logprobs_are_those_of_the_model_before_any_adjustment() -> None:
    """Temperature, bias and penalties change the choice, not the reported probabilities."""
    token = next_token(make(logprobs=2, logit_bias=((4, 9.0),)))
    expected = torch.tensor(LOGITS).log_softmax(-1).tolist()
    assert token.token_id == 4
    assert token.logprob == pytest.approx(expected[4])
    assert token.top_logprobs == ((1, pytest.approx(expected[1])), (2, pytest.approx(expected[2])))


def test_logprobs_are_absent_unless_asked_for() -> None:
    """None means none; zero means the sampled token's alone."""
    assert next_token(make()).logprob is None
    token = next_token(make(logprobs=0))
    assert token.logprob is not None
    assert token.top_logprobs == ()


def test_more_logprobs_than_tokens_are_clamped() -> None:
    """A request for a million gets the vocabulary (B23)."""
    assert len(next_token(make(logprobs=10**6)).top_logprobs) == 5


def test_a_logprob_of_minus_infinity_is_reported_as_a_finite_floor() -> None:
    """JSON has no infinity (B30)."""
    token = next_token(make(logprobs=3), [1.0, -math.inf, 0.0])
    assert token.top_logprobs[-1] == (1, LOGPROB_FLOOR)


def test_rows_with_different_wishes_do_not_disturb_each_other() -> None:
    """A mixed batch gives each row what it gets alone."""
    wishes: list[dict[str, object]] = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"logit_bias": ((3, 9.0),)},
        {"temperature": 0.8, "top_p": 0.7, "seed": 6, "logprobs": 2},
        {"temperature": 1.5, "top_k": 3, "repetition_penalty": 1.3},
        {"stop_token_ids": (1,), "min_tokens": 3},
        {"bad_words": ((1, 1), (2,)), "frequency_penalty": 0.3, "logprobs": 4},
        {"presence_penalty": 0.7, "repetition_penalty": 0.8, "logprobs": 0},
    ]
    seqs = [make([0, 2], [1], **wish) for wish in wishes]
    logits = torch.tensor([LOGITS] * len(seqs))
    together = sample(logits.clone(), seqs)
    assert together == [sample(logits[:1].clone(), [seq])[0] for seq in seqs]
    assert together == sample(logits, seqs[::-1])[::-1]


@pytest.mark.parametrize(
    "wish",
    [
        {"logit_bias": ((1, -9.0),)},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.5},
        {"bad_words": ((1,),)},
        {"stop_token_ids": (1,), "min_tokens": 3},
    ],
    ids=lambda wish: next(iter(wish)),
)
def test_what_one_request_asks_for_changes_no_logit_of_its_neighbours(
    wish: dict[str, object],
) -> None:
    """Not even of those that are too far down to be chosen."""
    rows = torch.tensor([LOGITS] * 3)
    adjusted = adjust_logits(rows, [make(), make([0, 1], [1, 2], **wish), make()])
    assert adjusted[1].tolist() != LOGITS
    assert adjusted[[0, 2]].tolist() == [LOGITS] * 2


def test_adjusting_leaves_the_models_own_logits_alone() -> None:
    """They are still needed for log-probabilities, and nobody pays for a copy unasked."""
    rows = torch.tensor([LOGITS, LOGITS])
    adjusted = adjust_logits(rows, [make(), make(bad_words=((1,),))])
    assert rows.tolist() == [LOGITS, LOGITS]
    assert adjusted.tolist() == [LOGITS, [1.0, -math.inf, 3.0, 2.0, 0.0]]
    assert adjust_logits(rows, [make(), make()]) is rows


def test_logits_of_a_padded_vocabulary_are_adjusted_as_the_others() -> None:
    """The rows may be a view of wider ones: neighbours in memory keep their values."""
    wide = torch.tensor([[*LOGITS, 50.0, 60.0]] * 2)
    asked = make([0, 6], [3, 6], repetition_penalty=2.0, bad_words=((1,), (6,)))
    narrow = adjust_logits(wide[:, :5], [make(), asked])
    assert narrow.tolist() == [LOGITS, [0.5, -math.inf, 3.0, 1.0, 0.0]]
    assert wide[:, 5:].tolist() == [[50.0, 60.0]] * 2
