"""One step ahead: the same answers, while the host is always a step behind the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace_worker.engine import draw
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.errors import EngineStepError
from headrace_worker.engine.messages import SequenceFinish
from headrace_worker.engine.one_ahead import OneAheadEngine
from support.oracle import OracleDecoder, make_engine, request, run, solo
from support.oracle_requests import WISHES

WAITED_FOR = [
    {"repetition_penalty": 1.5},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"bad_words": ((3, 4),)},
    {"logprobs": 2},
]


def ahead(**options: Any) -> Engine:
    """Return an engine over the oracle that schedules one step ahead."""
    return make_engine(one_ahead=True, **options)


def record(engine: Engine) -> list[str]:
    """Have an engine's runner write down when steps are launched and collected, by number."""
    runner: Any = engine.runner
    told: list[str] = []
    launch = runner.launch

    def launch_and_say(scheduled: Any) -> Any:
        step = launch(scheduled)
        number, collect = sum("launch" in line for line in told) + 1, step.collect
        told.append(f"launch {number}")

        class Said:
            corrected = property(lambda self: step.corrected)

            def collect(self) -> Any:
                told.append(f"collect {number}")
                return collect()

        return Said()

    runner.launch = launch_and_say
    return told


def test_a_step_is_launched_before_the_one_before_it_is_waited_for() -> None:
    """The device has work queued whenever the host reads results."""
    engine = ahead()
    told = record(engine)
    answers = run(engine, request(1, [1, 2], max_tokens=3))
    assert answers.tokens[1] == solo(request(1, [1, 2], max_tokens=3))
    expected = ["launch 1", "launch 2", "collect 1", "launch 3", "collect 2", "collect 3"]
    assert told == expected


@pytest.mark.parametrize("wish", WAITED_FOR, ids=lambda wish: next(iter(wish)))
def test_whoever_needs_the_last_token_is_waited_for(wish: dict[str, Any]) -> None:
    """Penalties, bad words and scores read the output: such a step lands before the next starts."""
    engine = ahead()
    told = record(engine)
    command = request(1, [1, 2], max_tokens=3, **wish)
    assert run(engine, command).tokens[1] == solo(command)
    assert told == [f"{what} {step}" for step in (1, 2, 3) for what in ("launch", "collect")]


def test_an_end_by_length_costs_no_step_too_many() -> None:
    """It is known beforehand, so nothing is computed for a sequence that is about to end."""
    rows: list[int] = []
    decoder = OracleDecoder(on_forward=lambda batch: rows.append(batch.num_tokens))
    answers = run(ahead(decoder=decoder), request(1, [1], max_tokens=4))
    assert answers.finished == {1: SequenceFinish.LENGTH}
    assert rows == [1, 1, 1, 1]


def test_the_token_after_a_stop_is_dropped() -> None:
    """The end is seen a step late: what was computed meanwhile is told to nobody."""
    whole = solo(request(1, [1, 2], max_tokens=8))
    rows: list[int] = []
    decoder = OracleDecoder(on_forward=lambda batch: rows.append(batch.num_tokens))
    command = request(1, [1, 2], max_tokens=8, stop_token_ids=(whole[2],))
    answers = run(ahead(decoder=decoder), command)
    assert answers.tokens[1] == whole[: whole.index(whole[2]) + 1]
    assert answers.finished == {1: SequenceFinish.STOP}
    assert len(rows) == len(answers.tokens[1]) + 1


def test_blocks_are_free_once_the_step_that_still_writes_to_them_has_landed() -> None:
    """Dropped with a step in flight, a sequence keeps its blocks until then, and no longer."""
    engine = ahead(num_blocks=8)
    engine.add(request(1, [1, 2, 3, 4, 5]))
    engine.step()
    engine.abort([1])
    assert engine.scheduler.pool.num_free == 8 - 2
    outcome = engine.step()
    assert outcome.tokens == ()
    assert engine.scheduler.pool.num_free == 8
    assert not engine.has_work


def test_an_id_may_come_again_while_its_old_step_is_in_flight() -> None:
    """What the old sequence still hears is not told to the new one."""
    engine = ahead()
    engine.add(request(1, [1, 2], max_tokens=9))
    engine.step()
    engine.abort([1])
    command = request(1, [7, 8, 9], max_tokens=5)
    assert run(engine, command).tokens[1] == solo(command)


def test_nobody_gives_way_while_a_step_is_in_flight() -> None:
    """Short of blocks, the engine lands first; then it preempts, and every answer is right."""
    engine = ahead(num_blocks=12, max_num_seqs=4)
    learned = make_engine()  # expects short answers, and so admits all four
    engine.scheduler.admission._growth = learned.scheduler.admission._growth
    for _ in range(200):
        engine.scheduler.admission._growth.learn(1, 50)
    commands = [request(i, [i] * 5, max_tokens=30) for i in range(1, 5)]
    answers = run(engine, *commands)
    assert answers.num_preemptions > 0
    assert answers.tokens == {command.seq_id: solo(command) for command in commands}


def test_answers_to_one_prompt_share_its_blocks_though_their_step_is_in_flight() -> None:
    """For n > 1 the others wait for the first one's prefill to land, and take its blocks."""
    engine = ahead(max_num_batched_tokens=64)
    prompt = [i % 61 for i in range(20)]
    commands = [request(i, prompt, temperature=1.0) for i in (1, 2, 3)]
    answers = run(engine, *commands)
    admitted = [entry for outcome in answers.outcomes for entry in outcome.admitted]
    assert admitted == [(1, 0), (2, 16), (3, 16)]
    assert answers.tokens == {command.seq_id: solo(command) for command in commands}


@pytest.mark.parametrize("wish", [*WISHES, {"temperature": 3.0, "top_p": 0.99}], ids=str)
def test_a_draw_in_doubt_is_corrected_and_goes_on_from_the_right_token(
    wish: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few candidates many draws are unsure; whatever read a wrong token is done again."""
    monkeypatch.setattr(draw, "_TOP_P_CANDIDATES", 2)
    monkeypatch.setattr(draw, "_CANDIDATES", (2, 6))
    commands = [request(i, [i, 7], max_tokens=20, **wish) for i in range(1, 6)]
    answers = run(ahead(max_num_seqs=3), *commands)
    assert answers.tokens == {command.seq_id: solo(command) for command in commands}


def test_draws_are_corrected_while_the_next_step_is_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above would prove nothing if none ever were."""
    monkeypatch.setattr(draw, "_TOP_P_CANDIDATES", 2)
    engine = ahead()
    assert isinstance(engine, OneAheadEngine)
    taken_back: list[int] = []
    take_back = engine._take_back
    monkeypatch.setattr(
        engine, "_take_back", lambda seq_ids: (taken_back.extend(seq_ids), take_back(seq_ids))
    )
    command = request(1, [1, 7], max_tokens=20, temperature=3.0, top_p=0.99)
    assert run(engine, command).tokens[1] == solo(command)
    assert len(taken_back) > 5


@pytest.mark.parametrize("wish", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_a_poisoned_row_fails_alone_though_the_next_step_has_read_its_token(
    wish: dict[str, Any],
) -> None:
    """Whatever was drawn from it is a token id at least, and is dropped with the sequence."""
    engine = ahead(decoder=OracleDecoder(nan_after=60))
    answers = run(engine, request(1, [1, 60], **wish), request(2, [5, 6], **wish))
    assert answers.failed[1].code == "engine_failure"
    assert "token 2" in answers.failed[1].message
    assert answers.tokens == {2: solo(request(2, [5, 6], **wish))}


def test_an_engine_that_breaks_names_everybody_in_flight() -> None:
    """Those whose step is lost, and those of the step that breaks: the queue hears of all."""
    num_forwards = 0

    def break_second(batch: object) -> None:
        nonlocal num_forwards
        num_forwards += 1
        if num_forwards == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine = ahead(decoder=OracleDecoder(on_forward=break_second), max_num_seqs=2)
    engine.add(request(1, [1], max_tokens=1))
    engine.step()
    engine.add(request(2, [2]))
    with pytest.raises(EngineStepError, match="illegal memory access") as caught:
        engine.step()
    assert sorted(caught.value.sequence_ids) == [1, 2]


def test_a_step_that_cannot_be_collected_names_everybody_in_flight() -> None:
    """Errors of a device are often noticed when results are waited for."""
    engine = ahead()
    runner: Any = engine.runner
    launch = runner.launch

    class Broken:
        corrected = frozenset[int]()

        def collect(self) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    runner.launch = lambda scheduled: launch(scheduled) and Broken()
    engine.add(request(1, [1]))
    engine.add(request(2, [2]))
    engine.step()
    with pytest.raises(EngineStepError, match="device-side assert") as caught:
        engine.step()
    assert sorted(caught.value.sequence_ids) == [1, 2]


def test_nobody_in_flight_is_a_bystander() -> None:
    """Should the device hang, either step may be to blame."""
    told: list[tuple[int, ...]] = []
    engine = ahead(max_num_seqs=1)
    engine.on_bystanders = told.append
    run(engine, request(1, [1], max_tokens=2), request(2, [2], max_tokens=2))
    assert told == [(2,), ()]


def test_pending_tokens_are_read_on_the_device() -> None:
    """The batch of a decode is built without its token, and filled in from the step before."""
    seen: list[list[int]] = []
    decoder = OracleDecoder(on_forward=lambda batch: seen.append(batch.input_ids.tolist()))
    command = request(1, [1, 2], max_tokens=3)
    run(ahead(decoder=decoder), command)
    tokens = solo(command)
    assert seen == [[1, 2], [tokens[0]], [tokens[1]]]
    assert torch.equal(torch.tensor(seen[1]), torch.tensor(tokens[:1]))
