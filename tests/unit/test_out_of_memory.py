"""A device without memory for a step: the batch shrinks, nobody is harmed, and it grows again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace_worker.attention.base import PackedBatch
from headrace_worker.engine.schedule import ScheduledSequence
from headrace_worker.engine.sequence import Sequence
from headrace_worker.engine.settings import Reserve
from headrace_worker.engine.step_limits import StepLimits
from support.oracle import OracleDecoder, make_engine, request, run, solo

AHEAD = pytest.mark.parametrize("one_ahead", [False, True], ids=["synchronous", "one-ahead"])


class SmallDevice(OracleDecoder):
    """Has memory for so many tokens a step, and none for the tokens of ``victim``."""

    def __init__(self, num_tokens: int, victim: int | None = None) -> None:
        self.failed: list[int] = []  # tokens of the steps that found no memory
        self.succeeded: list[int] = []  # and of those that did
        self.num_tokens = num_tokens
        self._victim = victim
        super().__init__(on_forward=self._look)

    def _look(self, batch: PackedBatch) -> None:
        is_cursed = bool((batch.input_ids == self._victim).any()) if self._victim else False
        if batch.num_tokens > self.num_tokens or is_cursed:
            self.failed.append(batch.num_tokens)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.succeeded.append(batch.num_tokens)


def share(num_new_tokens: int) -> ScheduledSequence:
    """Return a share of a sequence that matters to nobody."""
    return ScheduledSequence(Sequence(request(1, [1]), arrival=0), num_new_tokens)


@AHEAD
@pytest.mark.parametrize("reserve", Reserve)
def test_every_request_gets_its_tokens_from_smaller_batches(
    one_ahead: bool, reserve: Reserve
) -> None:
    """The last half waits again, and what had been computed of it is computed again."""
    device = SmallDevice(num_tokens=3)
    engine = make_engine(decoder=device, one_ahead=one_ahead, reserve=reserve)
    commands = [request(i, [i] * 6, temperature=1.0) for i in range(1, 8)]
    answers = run(engine, *commands)
    assert answers.tokens == {command.seq_id: solo(command) for command in commands}
    assert answers.failed == {}
    assert device.failed[0] == 16
    assert answers.num_preemptions > 0
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


@AHEAD
def test_a_request_that_never_finds_memory_fails_by_name_and_alone(one_ahead: bool) -> None:
    """It is tried alone, a token at a time; its neighbours get their answers."""
    device = SmallDevice(num_tokens=16, victim=60)
    engine = make_engine(decoder=device, one_ahead=one_ahead)
    commands = [request(1, [5, 6]), request(2, [1, 60, 2]), request(3, [7])]
    answers = run(engine, *commands)
    assert set(answers.failed) == {2}
    assert "out of memory" in answers.failed[2].message
    assert "Tried to allocate" in answers.failed[2].message
    assert answers.tokens == {1: solo(commands[0]), 3: solo(commands[2])}
    assert device.failed[-1] == 1


@AHEAD
def test_a_prompt_that_does_not_fit_in_one_piece_is_cut(one_ahead: bool) -> None:
    """Of a sequence alone, the chunk is halved until it fits."""
    device = SmallDevice(num_tokens=5)
    command = request(1, [i % 61 for i in range(30)])
    answers = run(make_engine(decoder=device, one_ahead=one_ahead), command)
    assert answers.tokens[1] == solo(command)
    assert device.failed == [16, 8]
    assert device.succeeded[:7] == [4] * 7


def test_a_step_in_flight_is_landed_before_anybody_is_given_up() -> None:
    """One token may find no memory beside the step before it, and find it alone."""
    device = SmallDevice(num_tokens=16)
    engine: Any = make_engine(decoder=device, one_ahead=True)
    launch = engine.runner.launch
    launches: list[int] = []

    def launch_alone_only(scheduled: Any) -> Any:
        launches.append(1)
        device.num_tokens = 0 if engine._flight is None and len(launches) % 2 == 0 else 16
        return launch(scheduled)

    engine.runner.launch = launch_alone_only
    command = request(1, [1, 2], max_tokens=4)
    assert run(engine, command).tokens[1] == solo(command)
    assert device.failed == [1, 1, 1]


def test_a_step_grows_again_after_many_that_found_memory() -> None:
    """Whoever took the memory may have gone: twice as much, and then all, is tried again."""
    device = SmallDevice(num_tokens=4)
    engine = make_engine(decoder=device, max_model_len=2000, num_blocks=2000)
    commands = [request(i, [i], max_tokens=600) for i in range(1, 9)]
    for command in commands:
        engine.add(command)
    engine.step()
    device.num_tokens = 16
    answers = run(engine)
    assert max(device.succeeded[:120]) == 4
    assert max(device.succeeded) == 8
    assert all(len(tokens) == 600 for tokens in answers.tokens.values())


def test_limits_are_halved_down_to_one_token_and_never_cross() -> None:
    """No more sequences than tokens: some of those running would never get a turn."""
    limits = StepLimits(8, 16)
    limits.halve([share(1), share(1), share(9)])
    assert (limits.num_seqs, limits.num_tokens) == (1, 5)
    limits.halve([share(1), share(1)])
    assert (limits.num_seqs, limits.num_tokens) == (1, 1)
    limits.halve([share(1)])
    assert (limits.num_seqs, limits.num_tokens) == (1, 1)


def test_limits_come_back_to_what_was_configured_and_no_further() -> None:
    """Doubled after every 128 good steps."""
    limits = StepLimits(6, 20)
    limits.halve([share(10)])
    assert (limits.num_seqs, limits.num_tokens) == (5, 5)
    seen = []
    while limits.is_reduced:
        limits.note_good_step()
        seen.append((limits.num_seqs, limits.num_tokens))
    assert len(seen) == 256
    assert list(dict.fromkeys(seen)) == [(5, 5), (6, 10), (6, 20)]
