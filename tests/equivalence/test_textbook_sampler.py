"""The textbook's sampling: each step by numbers that can be checked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace_worker.engine.draw import uniform
from headrace_worker.engine.messages import SamplingSpec
from support.textbook_sampler import NEAR, Row, adjust, choose, distance

SHARES = (0.1, 0.4, 0.2, 0.3)
ROW: Row = np.log(np.array(SHARES))


def spec(**options: Any) -> SamplingSpec:
    """Return a spec with that seed and those options."""
    return SamplingSpec(**{"max_tokens": 8, "seed": 0, **options})


def drawn(**options: Any) -> list[float]:
    """Return how often each token comes in a thousand draws."""
    counts = [0] * len(ROW)
    for position in range(1000):
        counts[choose(ROW, spec(**options), position)] += 1
    return [count / 1000 for count in counts]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, SHARES),
        ({"top_k": 2}, (0, 4 / 7, 0, 3 / 7)),
        ({"top_p": 0.65}, (0, 4 / 7, 0, 3 / 7)),
        ({"top_p": 0.75}, (0, 4 / 9, 2 / 9, 3 / 9)),
        ({"min_p": 0.6}, (0, 4 / 7, 0, 3 / 7)),
        ({"top_k": 3, "min_p": 0.6}, (0, 4 / 7, 0, 3 / 7)),
        ({"temperature": 0.5}, (1 / 30, 16 / 30, 4 / 30, 9 / 30)),
    ],
)
def test_tokens_come_as_often_as_their_share(
    options: dict[str, Any], wanted: tuple[float, ...]
) -> None:
    """Filters cut the tail and leave the proportions of the rest."""
    assert drawn(**options) == pytest.approx(wanted, abs=0.05)


def test_greedy_takes_the_most_likely() -> None:
    """No draw at temperature 0."""
    assert choose(ROW, spec(temperature=0.0), 3) == 1


def test_the_row_is_adjusted_in_the_documented_order() -> None:
    """Bias, then repetition over prompt and output, then the penalties of the output."""
    row = adjust(
        [1.0, -1.0, 2.0, 4.0],
        spec(
            logit_bias=((0, 1.0),),
            repetition_penalty=2.0,
            presence_penalty=0.5,
            frequency_penalty=0.25,
        ),
        prompt=(0, 1),
        output=(2, 2),
    )
    assert row.tolist() == [1.0, -2.0, 0.0, 4.0]


def test_stop_tokens_are_masked_until_there_are_enough_tokens() -> None:
    """The second token may be the end, the first may not."""
    options = spec(stop_token_ids=(1,), min_tokens=1)
    assert adjust(ROW, options, (0,), ())[1] == -np.inf
    assert adjust(ROW, options, (0,), (2,))[1] == ROW[1]


def test_the_last_token_of_a_bad_word_is_masked_behind_the_others() -> None:
    """Only output counts, and only when all the others stand at its end."""
    options = spec(bad_words=((3, 2), (0,)))
    assert np.isinf(adjust(ROW, options, (3,), ())).tolist() == [True, False, False, False]
    assert np.isinf(adjust(ROW, options, (1,), (3,))).tolist() == [True, False, True, False]


def test_the_distance_of_a_greedy_choice_is_the_gap_to_the_top() -> None:
    """Zero for the choice itself."""
    gaps = [distance(ROW, spec(temperature=0.0), 0, token_id) for token_id in range(4)]
    assert gaps == pytest.approx([np.log(4), 0, np.log(2), np.log(4 / 3)])


def test_the_distance_of_a_drawn_choice_is_that_of_its_share_from_the_number() -> None:
    """The shares lie in the order of the ids where nothing filters."""
    number = uniform(0, 7)
    ends = np.cumsum(SHARES)
    wanted = [
        max(0.0, end - share - number, number - end)
        for share, end in zip(SHARES, ends, strict=True)
    ]
    found = [distance(ROW, spec(), 7, token_id) for token_id in range(4)]
    assert found == pytest.approx(wanted)
    assert sum(gap == 0 for gap in found) == 1


def test_tokens_that_weigh_the_same_may_change_places() -> None:
    """Ranked by likelihood, two that are nearly equal lie in either order."""
    row = np.array([1.0, 1.0 + NEAR / 10, -5.0])
    options = spec(top_k=2)
    assert all(distance(row, options, position, 0) < NEAR for position in range(20))
    assert all(distance(row, options, position, 2) > NEAR for position in range(20))


def test_a_filtered_token_is_as_far_as_can_be() -> None:
    """Its limit is nowhere near."""
    assert distance(ROW, spec(top_k=2, min_p=0.5), 0, 0) >= 1
