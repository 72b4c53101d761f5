"""Whatever arrives, whenever it is dropped or breaks: books agree, all end, no token is wrong."""

from __future__ import annotations

from random import SystemRandom

import pytest
import torch
from hypothesis import HealthCheck, settings

from support.long_run import play_for
from support.oracle_limits import Tally
from support.oracle_machine import EngineMachine
from support.oracle_random import play_schedule


class Machine(EngineMachine):
    """Rules for hypothesis to choose from."""

    tally = Tally()


TestAnySchedule = Machine.TestCase
TestAnySchedule.settings = settings(
    max_examples=80,
    stateful_step_count=20,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize(
    ("num_schedules", "is_fast"),
    [(600, True), (601, True), (602, True), (120, False)],
    ids=["lists-1", "lists-2", "lists-3", "sampler"],
)
def test_no_random_schedule_changes_a_token_or_loses_a_block(
    num_schedules: int, is_fast: bool
) -> None:
    """Thousands of them a run, with fresh seeds: chunks, preemptions, shared prefixes, breakdowns.

    Every token is compared with what plain Python says of its request, and the books are checked
    after every step (B14, B16, B34, B35, B36, B53).
    """
    torch.set_num_threads(1)
    tally, first = Tally(), SystemRandom().getrandbits(48)
    for seed in range(first, first + num_schedules):
        play_schedule(seed, tally, is_fast=is_fast)
    assert tally.schedules == num_schedules
    assert tally.tokens > 10 * num_schedules
    assert tally.near_ties <= 1 + tally.tokens / 10_000
    # What never happened was not tested.
    for happened in (tally.preemptions, tally.cached_sequences, tally.aborts, tally.takeovers):
        assert happened > num_schedules / 40
    assert tally.breakdowns > num_schedules / 40
    assert is_fast or tally.shortages > num_schedules / 40


def test_a_long_run_counts_what_it_played() -> None:
    """What `make test-long` runs for minutes plays a round of each kind here."""
    tally = Tally()
    assert play_for(0, tally) == 0
    assert tally.schedules >= 60
    assert f"schedules {tally.schedules}" in str(tally)
