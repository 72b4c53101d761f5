"""The benchmark's way of driving an engine: when requests go in, and what is noted of them."""

from __future__ import annotations

import pytest

from benchmarks.job import Job
from benchmarks.systems.disturbed import NUM_STEPS_BEFORE, disturb
from benchmarks.systems.engine import run
from benchmarks.systems.feed import ContinuousFeed, StaticFeed
from benchmarks.systems.play import Played, StepNote, play
from benchmarks.workload import Item
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.settings import EngineSettings
from support.fake_engine import build_fake_engine


def _items(*lengths: int) -> list[Item]:
    return [Item([5, 6, 7 + place], length) for place, length in enumerate(lengths)]


def _engine(max_num_seqs: int = 4, budget: int = 64) -> Engine:
    settings = EngineSettings(
        model="fake", max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
    )
    return build_fake_engine(settings)


def _job(items: list[Item], *, is_sequential: bool = False) -> Job:
    return Job("fake", "mixed", items, _items(2), is_sequential=is_sequential, max_num_seqs=4)


def test_a_continuous_feed_hands_out_whoever_has_arrived() -> None:
    """Each request goes in at its time, whoever is still running."""
    items = [Item([1], 1, arrival_s=at) for at in (0.0, 0.0, 1.0)]
    feed = ContinuousFeed(items)
    assert feed.due(0.0, 0) == range(2)
    assert feed.due(0.5, 2) == range(2, 2)
    assert not feed.is_exhausted
    assert feed.due(1.0, 2) == range(2, 3)
    assert feed.is_exhausted


def test_a_static_feed_waits_for_the_last_of_a_batch() -> None:
    """The next batch goes in when nobody of the one before is left; the last may be short."""
    feed = StaticFeed(_items(1, 1, 1), 2)
    assert feed.due(0.0, 0) == range(2)
    assert feed.due(1.0, 1) == range(2, 2)
    assert feed.due(2.0, 0) == range(2, 3)
    assert feed.is_exhausted


@pytest.mark.parametrize("is_static", [False, True])
def test_every_request_gets_all_its_tokens(is_static: bool) -> None:
    """Both ways of batching do the same work."""
    lengths = (3, 1, 9, 4, 2, 8)
    played = run(_engine(), _job(_items(*lengths)), is_static=is_static)
    assert tuple(times.num_tokens for times in played.times) == lengths
    assert all(0 < times.ttft_s < played.elapsed_s for times in played.times)


def test_static_batches_leave_slots_empty() -> None:
    """With answers of skewed lengths, continuous batching needs fewer steps for the same tokens."""
    job = _job(_items(*(2, 20) * 6))
    static, continuous = (run(_engine(), job, is_static=is_static) for is_static in (True, False))
    assert len(continuous.steps) < 0.8 * len(static.steps)
    assert max(step.num_seqs for step in static.steps) == 4


def test_slot_use_is_weighed_by_time() -> None:
    """Two of four slots for one second and all for three are seven eighths."""
    played = Played([], [StepNote(1.0, 1.0, 2, 2), StepNote(4.0, 3.0, 4, 4)])
    assert played.slot_use(4) == pytest.approx(14 / 16)


def test_one_after_another_never_overlap() -> None:
    """A sequential run has one sequence a step, and a request arrives when it is sent."""
    played = run(_engine(), _job(_items(3, 3, 3), is_sequential=True), is_static=False)
    assert {step.num_seqs for step in played.steps} == {1}
    starts = [times.arrived_s for times in played.times]
    ends = [times.last_s or 0.0 for times in played.times]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_a_request_that_the_engine_refuses_ends_the_run() -> None:
    """A failed request is an error of the benchmark and no quick answer."""
    items = [Item([5] * 5000, 1)]
    with pytest.raises(RuntimeError, match="5000 tokens"):
        play(_engine(), items, ContinuousFeed(items), first_seq_id=1, is_sequential=False)


@pytest.mark.parametrize(("budget", "num_steps"), [(16, 7), (256, 1)])
def test_a_long_prompt_is_computed_in_chunks_of_the_budget(budget: int, num_steps: int) -> None:
    """Beside three decodes, 90 tokens take 7 steps of 16 and one of 256."""
    job = _job([*_items(200, 200, 200), Item(list(range(90)), 1)])
    before_s, during_s = disturb(_engine(budget=budget), job)
    assert len(before_s) == NUM_STEPS_BEFORE
    assert len(during_s) == num_steps


def test_decodes_that_end_too_soon_are_said() -> None:
    """A run whose decodes are over before the prompt is measures nothing, and says so."""
    job = _job([*_items(200, 3), Item(list(range(90)), 1)])
    with pytest.raises(RuntimeError, match="ended before"):
        disturb(_engine(), job)
