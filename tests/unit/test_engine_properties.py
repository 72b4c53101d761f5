"""Whatever arrives, whenever it is dropped: books agree, all end, answers are the solo ones."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_worker.engine.messages import AddSequence
from headrace_worker.engine.settings import Reserve
from support.oracle import Answers, make_engine, request, solo


@dataclass(frozen=True)
class Arrival:
    """A request, when it comes, and when it is dropped."""

    command: AddSequence
    at_step: int
    abort_at_step: int | None


@dataclass(frozen=True)
class Scenario:
    """An engine's limits and what happens to it."""

    num_blocks: int
    max_num_seqs: int
    budget: int
    reserve: Reserve
    caching: bool
    arrivals: list[Arrival]


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Up to eight requests; few different token ids, so prefixes are shared."""
    found = []
    for seq_id in range(1, draw(st.integers(1, 8)) + 1):
        shared = [7] * draw(st.integers(0, 12))
        own = draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
        command = request(
            seq_id,
            shared + own,
            max_tokens=draw(st.integers(1, 14)),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            priority=draw(st.sampled_from([0, 4, 9])),
            salt=draw(st.sampled_from([b"", b"x"])),
        )
        abort = draw(st.none() | st.integers(0, 20)) if draw(st.booleans()) else None
        found.append(Arrival(command, draw(st.integers(0, 10)), abort))
    return found


scenarios = st.builds(
    Scenario,
    num_blocks=st.integers(10, 24),  # the longest request takes ten blocks
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 24),
    reserve=st.sampled_from(list(Reserve)),
    caching=st.booleans(),
    arrivals=arrivals(),
)


@settings(max_examples=120, deadline=None)
@given(scenarios)
def test_any_schedule_ends_with_the_solo_answers_and_clean_books(scenario: Scenario) -> None:
    """Chunks, preemptions, shared prefixes and aborts never change a token or lose a block."""
    engine = make_engine(
        num_blocks=scenario.num_blocks,
        max_num_seqs=scenario.max_num_seqs,
        max_num_batched_tokens=scenario.budget,
        reserve=scenario.reserve,
        enable_prefix_caching=scenario.caching,
    )
    answers, aborted = Answers(), set[int]()
    for step in range(2000):
        for arrival in scenario.arrivals:
            if arrival.at_step == step:
                engine.add(arrival.command)
            if arrival.abort_at_step == step:
                engine.abort([arrival.command.seq_id])
                aborted.add(arrival.command.seq_id)
        if engine.has_work:
            outcome = engine.step()
            answers.take(outcome)
            engine.scheduler.pool.check_integrity()
            assert outcome.num_scheduled_tokens <= scenario.budget
            assert outcome.num_running <= scenario.max_num_seqs
            assert outcome.free_blocks <= engine.scheduler.pool.num_free
            assert not (outcome.preempted and outcome.admitted)
            assert not (outcome.preempted and scenario.reserve is Reserve.WORST)
        elif step > 20:
            break
    assert engine.scheduler.pool.num_free == scenario.num_blocks
    assert not engine.has_work
    for arrival in scenario.arrivals:
        seq_id, whole = arrival.command.seq_id, solo(arrival.command)
        if seq_id in answers.finished:
            assert answers.tokens[seq_id] == whole
        else:
            assert seq_id in aborted
            told = answers.tokens.get(seq_id, [])
            assert told == whole[: len(told)]
