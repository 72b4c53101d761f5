"""The engine process answers, sleeps when idle, says why it dies, and leaves nobody behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from headrace_worker.engine.messages import (
    AbortSequences,
    EngineFailed,
    EngineReady,
    Ping,
    Pong,
    SetPaused,
    SetPriority,
    Shutdown,
    StepOutcome,
)
from headrace_worker.engine.settings import EngineSettings
from support.engine_process import REAL_ENGINE, EngineProcess, start_engine
from support.fake_engine import Misfortune, fake_answer
from support.oracle import request
from support.waiting import PATIENCE_S


def answer_of(engine: EngineProcess, seq_id: int) -> list[int]:
    """Collect a sequence's tokens up to its finish."""
    outcomes = engine.receive_until(StepOutcome, lambda outcome: seq_id in dict(outcome.finished))
    tokens = [token for outcome in outcomes for token in outcome.tokens]
    return [token.token_id for token in tokens if token.seq_id == seq_id]


def test_settings_in_ready_out_then_answers_then_a_clean_end() -> None:
    """The whole life of an engine process."""
    with start_engine() as engine:
        ready = engine.receive(EngineReady)
        assert (ready.model, ready.max_model_len, ready.block_size) == ("fake", 256, 16)
        engine.send(request(1, [1, 2, 3], max_tokens=6))
        assert answer_of(engine, 1) == fake_answer([1, 2, 3], max_tokens=6, seed=1)
        engine.send(Shutdown())
        assert engine.child.wait(PATIENCE_S) == 0


def test_commands_that_arrive_with_the_settings_are_not_lost() -> None:
    """The parent need not wait for the engine to be ready."""
    with start_engine() as engine:
        engine.send(request(1, [5], max_tokens=2), Ping(3))
        assert engine.receive(Pong).nonce == 3
        assert answer_of(engine, 1) == fake_answer([5], max_tokens=2, seed=1)


def test_a_paused_engine_answers_but_does_not_step() -> None:
    """Back-pressure stops the tokens, not the conversation."""
    with start_engine() as engine:
        engine.send(SetPaused(True), request(1, [1], max_tokens=3), Ping(1))
        assert engine.receive(Pong) == Pong(1, 0)
        engine.send(SetPaused(False))
        assert answer_of(engine, 1) == fake_answer([1], max_tokens=3, seed=1)


def test_a_busy_engine_takes_commands_between_two_steps() -> None:
    """A ping and an abort are heard while tokens are made."""
    with start_engine("--step-s", "0.005") as engine:
        engine.send(request(1, [1], max_tokens=200))
        engine.receive(StepOutcome)
        engine.send(Ping(1), AbortSequences((1,)), Ping(2))
        pongs = [engine.receive(Pong), engine.receive(Pong)]
        assert [pong.nonce for pong in pongs] == [1, 2]
        assert pongs[1].step < 200
        assert engine.receive(StepOutcome).num_running == 0


def test_an_idle_engine_uses_no_processor_time() -> None:
    """It sleeps on its channel: under two per cent of a core (B50)."""
    with start_engine() as engine:
        engine.receive(EngineReady)
        engine.send(request(1, [1], max_tokens=3))
        answer_of(engine, 1)
        started_s, used_s = time.monotonic(), engine.cpu_s
        with pytest.raises(TimeoutError):
            engine.receive(StepOutcome, timeout_s=1.5)  # nothing happens, and nothing is reported
        assert engine.cpu_s - used_s <= 0.02 * (time.monotonic() - started_s) + 0.01


def test_a_request_that_fails_leaves_its_neighbours_alone() -> None:
    """One failure is reported, the other answer is complete."""
    with start_engine() as engine:
        engine.send(
            request(1, [1, Misfortune.FAIL_REQUEST, 2], max_tokens=5),
            request(2, [4, 5], max_tokens=5),
        )
        outcomes = engine.receive_until(StepOutcome, lambda outcome: bool(outcome.finished))
        (failure,) = [failure for outcome in outcomes for failure in outcome.failed]
        assert (failure.seq_id, failure.code) == (1, "engine_failure")
        told = [t.token_id for outcome in outcomes for t in outcome.tokens if t.seq_id == 2]
        assert told == fake_answer([4, 5], max_tokens=5, seed=2)


def test_a_broken_engine_says_who_was_in_the_batch_and_exits() -> None:
    """The queue can be told at once, and a supervisor sees the status."""
    with start_engine() as engine:
        engine.send(request(1, [1, 2]), request(2, [Misfortune.BREAK_ENGINE, 0]))
        failed = engine.receive(EngineFailed)
        assert sorted(failed.seq_ids) == [1, 2]
        assert "asked to break" in failed.message
        assert engine.child.wait(PATIENCE_S) == 1


def test_a_killed_engine_closes_the_channel() -> None:
    """The parent notices without asking, after the tokens that came before."""
    with start_engine() as engine:
        engine.send(request(1, [1, Misfortune.CRASH, 2], max_tokens=9))
        with pytest.raises(ConnectionError):
            answer_of(engine, 1)
        assert engine.child.wait(PATIENCE_S) == -signal.SIGKILL


@pytest.mark.parametrize("prompt", [[1], [Misfortune.HANG, 0]], ids=["idle", "hung"])
def test_no_engine_outlives_its_parent(prompt: list[int]) -> None:
    """The end of the channel ends the process, even amid a step that never returns."""
    with start_engine() as engine:
        engine.send(request(1, prompt, max_tokens=1))
        engine.receive(EngineReady)
        engine.socket.close()
        assert engine.child.wait(PATIENCE_S) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_left_to_the_parent(number: int) -> None:
    """Ctrl-C in a terminal reaches the engine, too, and must not stop it before the drain."""
    with start_engine() as engine:
        engine.receive(EngineReady)
        engine.child.send_signal(number)
        engine.send(request(1, [1], max_tokens=3))
        assert answer_of(engine, 1) == fake_answer([1], max_tokens=3, seed=1)


def test_a_model_that_cannot_be_loaded_is_reported_before_the_exit(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The real process, asked for a folder that is not there: the reason, and no traceback."""
    settings = EngineSettings(model="./no-such-model", device="cpu", dtype="float32")
    with start_engine(command=REAL_ENGINE, settings=settings) as engine:
        failed = engine.receive(EngineFailed, timeout_s=90)
        assert "no-such-model" in failed.message
        assert failed.seq_ids == ()
        assert engine.child.wait(PATIENCE_S) == 1
    assert "Traceback" not in capfd.readouterr().err


def test_a_fault_of_ours_is_reported_with_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """What nobody foresaw has to be found."""
    with start_engine() as engine:
        engine.send(request(1, [Misfortune.BREAK_ENGINE, 0]))
        engine.receive(EngineFailed)
        assert engine.child.wait(PATIENCE_S) == 1
    assert "Traceback" in capfd.readouterr().err


def test_a_first_message_that_is_not_the_settings_is_an_error() -> None:
    """A parent of another version is told so."""
    with start_engine() as engine:
        engine.receive(EngineReady)
        engine.send(EngineSettings(model="again"))
        assert "EngineSettings is not a command" in engine.receive(EngineFailed).message


def test_a_priority_that_is_changed_counts_from_the_next_step_on() -> None:
    """Out of blocks, the sequence that has become the least urgent gives way, not the newest."""
    with start_engine("--num-blocks", "8") as engine:
        engine.receive(EngineReady)
        engine.send(SetPaused(True))
        engine.send(*(request(seq_id, [seq_id], max_tokens=100) for seq_id in (1, 2)))
        engine.send(SetPriority(1, 9), SetPriority(77, 0), SetPaused(False))
        outcomes = engine.receive_until(StepOutcome, lambda outcome: bool(outcome.preempted))
        assert outcomes[-1].preempted == (1,)
        rest = answer_of(engine, 1)
        assert rest == fake_answer([1], max_tokens=100, seed=1)[-len(rest) :]


HANGS_AT_ITS_END = """
import atexit, threading
from headrace_worker.engine.process import leave
atexit.register(threading.Event().wait)
print("all is said")
leave(7)
"""


def test_a_library_that_hangs_at_the_end_holds_nobody_up() -> None:
    """As CUDA's may with a broken device, and NCCL's with a rank that is gone."""
    ended = subprocess.run(
        [sys.executable, "-c", HANGS_AT_ITS_END],
        capture_output=True, check=False, timeout=PATIENCE_S, text=True,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (7, "all is said\n")
