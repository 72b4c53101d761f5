"""Plays items on an engine in this process, without Redis, and notes when each token came."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.job import TokenTimes
from benchmarks.systems.feed import Feed
from benchmarks.workload import Item
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.messages import AddSequence, SamplingSpec, StepOutcome

_IDLE_S = 0.0005  # between two looks for an arrival, when nothing runs


@dataclass(frozen=True, slots=True)
class StepNote:
    """One step, as the plots need it."""

    end_s: float  # since the run began
    step_s: float
    num_seqs: int  # that had a share of it
    num_tokens: int  # prefill and decode


@dataclass(slots=True)
class Played:
    """What happened; it grows step by step."""

    times: list[TokenTimes]  # one an item, in order
    steps: list[StepNote] = field(default_factory=list)
    elapsed_s: float = 0.0

    def slot_use(self, num_slots: int) -> float:
        """Return the share of slots × time in which a sequence was computed, in [0, 1]."""
        used = sum(step.num_seqs * step.step_s for step in self.steps)
        return used / (num_slots * sum(step.step_s for step in self.steps))


def play(
    engine: Engine, items: Sequence[Item], feed: Feed, *, first_seq_id: int, is_sequential: bool
) -> Played:
    """Run all items to their ends.

    A request has arrived when its item says so; where they are sent one after another, when it is
    sent. Raises RuntimeError when the engine fails one.
    """
    start_s = time.perf_counter()
    played = Played([TokenTimes(item.arrival_s) for item in items])
    num_unfinished = 0
    while num_unfinished or not feed.is_exhausted:
        now_s = time.perf_counter() - start_s
        for place in feed.due(now_s, num_unfinished):
            engine.add(command(first_seq_id + place, items[place]))
            num_unfinished += 1
            if is_sequential:
                played.times[place].arrived_s = now_s
        if engine.has_work:
            num_unfinished -= _note(played, engine.step(), first_seq_id, start_s)
        else:
            time.sleep(_IDLE_S)
    played.elapsed_s = time.perf_counter() - start_s
    return played


def command(seq_id: int, item: Item) -> AddSequence:
    """Return what starts an item, greedily and to its full length."""
    spec = SamplingSpec(max_tokens=item.num_output_tokens, seed=seq_id, temperature=0.0)
    return AddSequence(seq_id, tuple(item.prompt), len(item.prompt), spec)


def _note(played: Played, outcome: StepOutcome, first_seq_id: int, start_s: float) -> int:
    """Take down what a step did; return how many sequences it ended."""
    if outcome.failed:
        raise RuntimeError(f"the engine failed a request: {outcome.failed[0].message}")
    now_s = time.perf_counter() - start_s
    for token in outcome.tokens:
        played.times[token.seq_id - first_seq_id].saw(now_s)
    note = StepNote(now_s, outcome.step_s, outcome.num_scheduled_seqs, outcome.num_scheduled_tokens)
    played.steps.append(note)
    return len(outcome.finished)
