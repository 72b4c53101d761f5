"""A play: which requests of a workload come when, resume where, and are dropped at what moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from headrace_worker.engine.messages import AddSequence, SequenceFinish, StepOutcome, TokenScore
from headrace_worker.engine.sequence import Sequence as EngineSequence
from headrace_worker.engine.sequence import SequenceStatus
from support.matrix_workload import Ask
from support.recorded_engine import RecordedEngine, RecordedModel

BLOCK_SIZE = 16  # tokens, where a play does not say
MAX_STEPS = 20_000  # of a round; more would mean that it makes no progress


class Moment(Enum):
    """When a request is dropped: as soon as a step leaves it there."""

    WAITING = "waiting"  # never run
    PREFILLING = "prefilling"  # a part of its prompt is computed
    DECODING = "decoding"  # has said two tokens
    PREEMPTED = "preempted"  # has run, and waits again


class Event(Enum):
    """What a play is for; one that never happens makes it worthless."""

    PREEMPTION = "a preemption"
    CACHE_HIT = "a hit in the prefix cache"
    MIXED_STEP = "a step with both a chunk and a decode"
    CHUNKED_PROMPT = "a prompt that took several steps"
    DROP = "the moment to drop a request"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the workload comes."""

    ask: int  # its place in the workload
    at_step: int = 0  # of its round
    num_known: int = 0  # leading tokens of its answer that an earlier worker has emitted
    drop_when: Moment | None = None  # None: it may finish
    priority: int = 5
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Play:
    """Rounds of arrivals on one engine; each round ends when the engine is idle."""

    rounds: tuple[tuple[Arrival, ...], ...]
    settings: Mapping[str, Any] = field(default_factory=dict)  # of EngineSettings
    num_blocks: int | None = None  # of the pool; None: more than enough
    must: frozenset[Event] = frozenset()


@dataclass(slots=True)
class Heard:
    """What one arrival was told."""

    arrival: Arrival
    token_ids: list[int] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)  # [vocab] each, what they came from
    scores: list[TokenScore] = field(default_factory=list)  # of prompt tokens, where asked for
    finish: SequenceFinish | None = None  # None: it was dropped
    was_dropped: bool = False


class Stage:
    """A model's folder and a workload, on which plays are performed."""

    def __init__(self, folder: Path, asks: Sequence[Ask], *, dtype: str = "float32") -> None:
        self.asks = asks
        self._model = RecordedModel(folder, dtype=dtype)
        some_engine = self._model.load_engine({"kv_cache_memory_bytes": 2**20})
        self._kv_bytes_per_token = some_engine.ready.kv_bytes_per_token

    def perform(
        self, play: Play, answers: Sequence[Sequence[int]]
    ) -> tuple[list[Heard], set[Event]]:
        """Run a play on a fresh engine; ``answers`` are what takeovers go on from.

        Returns what each arrival heard, and which events happened.
        """
        block_size = play.settings.get("block_size", BLOCK_SIZE)
        num_blocks = play.num_blocks or self._enough_blocks(play, block_size)
        num_bytes = (num_blocks + 1) * block_size * self._kv_bytes_per_token
        memory = {"block_size": block_size, "kv_cache_memory_bytes": num_bytes}
        recorded = self._model.load_engine({**play.settings, **memory})
        heard: list[Heard] = []
        events: set[Event] = set()
        for arrivals in play.rounds:
            a_round = _Round(recorded, self.asks, answers, first_id=len(heard))
            a_round.run(arrivals)
            heard += a_round.heard.values()
            events |= a_round.events
        assert recorded.engine.scheduler.pool.num_free == num_blocks
        return heard, events

    def _enough_blocks(self, play: Play, block_size: int) -> int:
        """Return the blocks for all of the largest round; a larger pool is slower to check."""
        sizes = [-(-(len(ask.prompt) + ask.sampling.max_tokens) // block_size) for ask in self.asks]
        return max(sum(sizes[arrival.ask] for arrival in arrivals) for arrivals in play.rounds)


class _Round:
    """One round under way."""

    def __init__(
        self,
        recorded: RecordedEngine,
        asks: Sequence[Ask],
        answers: Sequence[Sequence[int]],
        first_id: int,
    ) -> None:
        self.heard: dict[int, Heard] = {}  # by seq_id
        self.events: set[Event] = set()
        self._recorded = recorded
        self._asks = asks
        self._answers = answers
        self._first_id = first_id

    def run(self, arrivals: Sequence[Arrival]) -> None:
        """Feed and step the engine until everybody has come and it is idle."""
        engine = self._recorded.engine
        to_come = sorted(arrivals, key=lambda arrival: arrival.at_step)
        step = 0
        while to_come or engine.has_work:
            while to_come and to_come[0].at_step <= step:
                self._add(to_come.pop(0))
            if engine.has_work:
                self._take(*self._recorded.step())
                self._drop()
            step += 1
            assert step < MAX_STEPS, "no progress"

    def _add(self, arrival: Arrival) -> None:
        ask, seq_id = self._asks[arrival.ask], self._first_id + len(self.heard)
        self.heard[seq_id] = Heard(arrival)
        known = tuple(self._answers[arrival.ask][: arrival.num_known]) if arrival.num_known else ()
        self._recorded.add(
            AddSequence(
                seq_id,
                ask.prompt + known,
                len(ask.prompt),
                ask.sampling,
                arrival.priority,
                arrival.salt,
            )
        )

    def _take(self, outcome: StepOutcome, rows: list[torch.Tensor]) -> None:
        assert not outcome.failed, outcome.failed
        for token, row in zip(outcome.tokens, rows, strict=True):
            heard = self.heard[token.seq_id]
            assert heard.finish is None
            assert not heard.was_dropped
            heard.token_ids.append(token.token_id)
            heard.rows.append(row)
        for part in outcome.prompt_logprobs:
            scores = self.heard[part.seq_id].scores
            assert part.start == len(scores) + 1, "each is told once, in order"
            scores += part.scores
        for seq_id, reason in outcome.finished:
            self.heard[seq_id].finish = reason
        self.events |= _events(outcome)

    def _drop(self) -> None:
        scheduler = self._recorded.engine.scheduler
        for seq in (*scheduler.waiting, *scheduler.running):
            if 0 < seq.num_computed_tokens < seq.num_prompt_tokens:
                self.events.add(Event.CHUNKED_PROMPT)
            heard = self.heard[seq.seq_id]
            if heard.arrival.drop_when in _moments(seq):
                heard.was_dropped = True
                self.events.add(Event.DROP)
                self._recorded.engine.abort([seq.seq_id])


def _events(outcome: StepOutcome) -> set[Event]:
    happened = {
        Event.PREEMPTION: bool(outcome.preempted),
        Event.CACHE_HIT: any(num_cached for _, num_cached in outcome.admitted),
        Event.MIXED_STEP: 0 < outcome.num_prefill_tokens < outcome.num_scheduled_tokens,
    }
    return {event for event, happens in happened.items() if happens}


def _moments(seq: EngineSequence) -> set[Moment]:
    is_waiting = seq.status is SequenceStatus.WAITING
    found = {
        Moment.WAITING: is_waiting and not seq.was_admitted,
        Moment.PREFILLING: 0 < seq.num_computed_tokens < seq.num_prompt_tokens,
        Moment.DECODING: not is_waiting and seq.num_output_tokens >= 2,
        Moment.PREEMPTED: is_waiting and seq.was_admitted,
    }
    return {moment for moment, holds in found.items() if holds}
