"""The expected growth follows what sequences really use of their max_tokens."""

from __future__ import annotations

import pytest

from headrace_worker.engine.growth import Growth


def learn(growth: Growth, *seen: tuple[int, int], times: int = 1) -> None:
    """Let sequences of (used, allowed) tokens leave, in turns."""
    for _ in range(times):
        for num_used, num_allowed in seen:
            growth.learn(num_used, num_allowed)


def test_before_anybody_has_left_a_half_is_expected() -> None:
    """Neither hope nor fear."""
    assert Growth().share == 0.5


def test_one_short_answer_does_not_change_much() -> None:
    """The first to leave are the shortest, so they are not taken for all."""
    growth = Growth()
    learn(growth, (1, 1000))
    assert 0.45 < growth.share < 0.5


def test_the_share_settles_at_what_is_used() -> None:
    """After a few hundred sequences the first guess is forgotten."""
    growth = Growth()
    learn(growth, (30, 100), times=300)
    assert growth.share == pytest.approx(0.3, abs=0.001)


def test_the_expected_sum_of_a_mix_is_its_real_sum() -> None:
    """Full answers of 16 tokens beside 160 of 8,000: 88 of 4,008 tokens, not half of them."""
    growth = Growth()
    learn(growth, (16, 16), (160, 8000), times=300)
    assert growth.share == pytest.approx(88 / 4008, rel=0.1)


def test_the_share_stays_within_nothing_and_all() -> None:
    """Whatever is seen, nobody is expected to use less than nothing or more than allowed."""
    growth = Growth()
    learn(growth, (0, 10), times=300)
    assert 0 <= growth.share < 0.01
    learn(growth, (7, 7), (9000, 9000), times=300)
    assert 0.99 < growth.share <= 1
