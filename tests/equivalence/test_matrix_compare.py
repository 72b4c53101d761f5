"""The matrix's judge: it finds every fault, and excuses only what the reference leaves open."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from headrace_worker.engine.messages import SamplingSpec, SequenceFinish, TokenScore
from support.matrix_compare import Tally, Wanted, compare, total
from support.matrix_play import Arrival, Heard
from support.matrix_workload import Ask

# Behind both tokens of the prompt, and the three of the answer.
ROWS = torch.tensor(
    [[9.0, 9.0, 9.0], [0.0, 3.0, 1.0], [2.0, 0.0, 1.9995], [0.0, 0.0, 1.0], [9.0, 9.0, 9.0]]
)
ASK = Ask("greedy", (1, 2), SamplingSpec(max_tokens=3, seed=0, temperature=0.0))
WANTED = Wanted(ASK, (1, 0, 2), ROWS, SequenceFinish.LENGTH)


def told(*token_ids: int, start: int = 0) -> Heard:
    """Return what a sequence heard, with the reference's own logits."""
    rows = list(ROWS[1 + start :][: len(token_ids)])
    arrival = Arrival(0, num_known=start)
    return Heard(arrival, list(token_ids), rows, finish=SequenceFinish.LENGTH)


def test_the_same_answer_is_identical() -> None:
    """Every id is compared and found."""
    assert compare("x", told(1, 0, 2), WANTED) == Tally(1, 3, 3)


def test_the_rest_of_a_taken_over_answer_is_compared_at_its_place() -> None:
    """Two tokens were known; the third is the one at offset two."""
    assert compare("x", told(2, start=2), WANTED) == Tally(1, 1, 1)


def test_another_id_is_a_failure() -> None:
    """The reference was sure, so the mismatch is named with its place and its gap."""
    tally = compare("x", told(2), WANTED)
    assert tally.failures == ["x, token 0: 2 for 1, with 2.0e+00 between them"]
    assert (tally.num_ids, tally.num_identical, tally.near_ties) == (1, 0, [])


def test_a_near_tie_is_excused_once_and_ends_the_comparison() -> None:
    """Behind it stands another text, which nothing is known of."""
    tally = compare("x", told(1, 2, 0), WANTED)
    assert tally.near_ties == ["x, token 1: 2 for 0, with 5.0e-04 between them"]
    assert (tally.num_ids, tally.num_identical, tally.failures) == (2, 1, [])


def test_a_third_token_is_not_excused_by_a_near_tie_of_two_others() -> None:
    """Only the tied ones may come out."""
    assert len(compare("x", told(1, 1), WANTED).failures) == 1


@pytest.mark.parametrize("value", [3.001, float("nan")])
def test_a_logit_that_is_off_is_a_failure(value: float) -> None:
    """The ids may still agree by luck."""
    heard = told(1, 0, 2)
    heard.rows[0] = torch.tensor([0.0, value, 1.0])
    tally = compare("x", heard, WANTED)
    assert [f.split(" from ")[1] for f in tally.failures] == ["that of transformers"]


def test_an_answer_that_goes_on_is_a_failure() -> None:
    """Tokens beyond the end of the wanted ones."""
    wanted = replace(WANTED, token_ids=(1, 0))
    assert compare("x", told(1, 0, 2), wanted).failures == ["x: goes on after its 2 tokens"]


def test_an_answer_that_breaks_off_is_a_failure_unless_it_was_dropped() -> None:
    """A dropped neighbour has to agree as far as it came."""
    heard = told(1, 0)
    assert len(compare("x", heard, WANTED).failures) == 1
    heard.was_dropped = True
    assert compare("x", heard, WANTED).failures == []


def test_another_reason_to_end_is_a_failure() -> None:
    """The ids agree, the finish does not."""
    wanted = replace(WANTED, finish=SequenceFinish.STOP)
    assert len(compare("x", told(1, 0, 2), wanted).failures) == 1


@pytest.mark.parametrize(
    ("scores", "num_failures"),
    [
        ([TokenScore(2, -math.log(3))], 0),
        ([TokenScore(2, -1.0)], 1),
        ([TokenScore(1, -math.log(3))], 1),
        ([], 1),
    ],
)
def test_scores_of_the_prompt_are_those_of_transformers(
    scores: list[TokenScore], num_failures: int
) -> None:
    """All are there, in order, and none is off."""
    spec = replace(ASK.sampling, prompt_logprobs=0)
    wanted = replace(WANTED, ask=replace(ASK, sampling=spec))
    heard = told(1, 0, 2)
    heard.scores = scores
    assert len(compare("x", heard, wanted).failures) == num_failures


def test_tallies_add_up() -> None:
    """Counts are summed, lists joined, the largest difference kept."""
    parts = [Tally(1, 3, 2, 0.5, ["tie"], []), Tally(1, 4, 4, 0.25, [], ["fault"])]
    assert total(parts) == Tally(2, 7, 6, 0.5, ["tie"], ["fault"])
