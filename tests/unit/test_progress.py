"""The watch over the engine: silence past the limit is a hang, unless it was we who slept."""

from __future__ import annotations

import pytest

from headrace_worker.backoff import Backoff
from headrace_worker.serving.progress import ProgressWatch


@pytest.fixture
def watch() -> ProgressWatch:
    """Give a watch with a limit of 10 s that looks every second, over an engine started at 0."""
    watch = ProgressWatch(hang_limit_s=10, look_every_s=1)
    watch.engine_started(now=0)
    return watch


def test_an_engine_that_reports_is_alive(watch: ProgressWatch) -> None:
    """Each step or pong counts from anew."""
    for now in range(0, 100, 9):
        watch.reported(now)
        assert watch.is_alive(now + 9)


def test_silence_past_the_limit_is_a_hang(watch: ProgressWatch) -> None:
    """At the limit it is still alive, behind it leases are not renewed any more."""
    for now in range(1, 12):
        watch.look(now)
    assert watch.is_alive(10)
    assert not watch.is_alive(10.5)
    assert watch.is_hung(10.5)


def test_without_an_engine_nothing_is_alive_and_nothing_hangs(watch: ProgressWatch) -> None:
    """A late report of a dead engine does not wake it."""
    watch.engine_gone()
    watch.reported(5)
    assert not watch.is_alive(5)
    assert not watch.is_hung(50)


def test_our_own_sleep_is_not_held_against_the_engine(watch: ProgressWatch) -> None:
    """After a stop of this process the engine gets its whole time again."""
    watch.look(1)
    watch.look(60)
    assert watch.is_alive(60)
    assert not watch.is_hung(69)
    for now in range(61, 71):
        watch.look(now)
    assert watch.is_hung(71)


def test_waits_double_up_to_the_cap_and_start_anew() -> None:
    """Jitter takes up to a quarter off, never adds."""
    backoff = Backoff(1.0, 8.0)
    waits = [backoff.next_delay_s() for _ in range(6)]
    for wait, most in zip(waits, (1, 2, 4, 8, 8, 8), strict=True):
        assert 0.75 * most <= wait <= most
    backoff.reset()
    assert backoff.next_delay_s() <= 1
