"""The supervisor over real engine processes: started, heard, replaced, never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from headrace_worker.backoff import Backoff
from headrace_worker.engine.messages import (
    AddSequence,
    EngineFailed,
    EngineReady,
    Ping,
    SamplingSpec,
    SetPaused,
    StepOutcome,
)
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.serving.bridge import EngineBridge, EngineStartFailed
from headrace_worker.serving.progress import ProgressWatch
from headrace_worker.serving.supervisor import EngineDeath, Supervisor
from support.engine_process import FAKE_ENGINE
from support.fake_engine import Misfortune, fake_answer
from support.process_tree import is_running
from support.waiting import eventually, eventually_async

SETTINGS = EngineSettings(model="fake", max_model_len=256)


class AttentiveWatch(ProgressWatch):
    """A watch that tells when it last heard of the engine."""

    heard_at = 0.0  # monotonic second of the last step or pong

    def reported(self, now: float) -> None:
        self.heard_at = now
        super().reported(now)


class Listening:
    """A supervised engine and all that it said."""

    def __init__(self, argv: tuple[str, ...] = FAKE_ENGINE, *, hang_limit_s: float = 60.0) -> None:
        self.started: list[EngineReady] = []
        self.outcomes: list[StepOutcome] = []
        self.deaths: list[EngineDeath] = []
        self.watch = AttentiveWatch(hang_limit_s, 0.05)
        self.supervisor = Supervisor(
            argv,
            SETTINGS,
            watch=self.watch,
            look_every_s=0.05,
            backoff=Backoff(0.01, 0.1),
            clock=time.monotonic,
        )

    def engine_started(self, ready: EngineReady) -> None:
        self.started.append(ready)

    def engine_stepped(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)

    async def engine_died(self, death: EngineDeath) -> None:
        self.deaths.append(death)

    @property
    def tokens(self) -> list[int]:
        """Token ids so far."""
        return [token.token_id for outcome in self.outcomes for token in outcome.tokens]

    def add(self, *prompt: int, seq_id: int = 1) -> None:
        """Ask for ten tokens."""
        sampling = SamplingSpec(max_tokens=10, seed=1)
        self.supervisor.send(AddSequence(seq_id, prompt, len(prompt), sampling))

    async def until(self, *, starts: int = 0, deaths: int = 0, tokens: int = 0) -> None:
        """Return when so much has happened."""

        async def enough() -> bool:
            return (
                len(self.started) >= starts
                and len(self.deaths) >= deaths
                and len(self.tokens) >= tokens
            )

        await eventually_async(enough)


@asynccontextmanager
async def supervised(listening: Listening) -> AsyncIterator[Listening]:
    """Start, listen and watch; leave no child behind."""
    ready = await listening.supervisor.start()
    tasks = [
        asyncio.create_task(listening.supervisor.run(ready, listening)),
        asyncio.create_task(listening.supervisor.watch()),
    ]
    try:
        yield listening
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await listening.supervisor.stop()


async def test_a_sequence_is_answered_step_by_step() -> None:
    """What is sent comes back as outcomes, in order."""
    async with supervised(Listening()) as listening:
        listening.add(5, 6, 7)
        await listening.until(tokens=10)
        assert listening.tokens == fake_answer((5, 6, 7), max_tokens=10, seed=1)


async def test_a_crash_is_told_and_the_next_engine_works() -> None:
    """Nobody can say who was in the batch, and a fresh engine takes over."""
    async with supervised(Listening()) as listening:
        listening.add(5, Misfortune.CRASH, 2)
        await listening.until(starts=2, deaths=1)
        assert listening.deaths == [EngineDeath("killed by signal 9", None)]
        listening.outcomes.clear()
        listening.add(5, 6, 7, seq_id=2)
        await listening.until(tokens=10)


async def test_an_engine_that_breaks_names_its_batch() -> None:
    """The step raises: the engine says who was in it before it leaves."""
    async with supervised(Listening()) as listening:
        listening.add(5, Misfortune.BREAK_ENGINE, 2, seq_id=7)
        await listening.until(starts=2, deaths=1)
        (death,) = listening.deaths
        assert death.seq_ids == (7,)
        assert "break the engine" in death.reason


async def test_the_last_words_of_an_engine_are_heard_by_who_speaks_to_it() -> None:
    """It has broken and is gone; a ping comes too late for it, and its report is still read."""
    bridge = await EngineBridge.start(FAKE_ENGINE, SETTINGS)
    try:
        await bridge.wait_ready()
        sampling = SamplingSpec(max_tokens=10, seed=1)
        bridge.send(AddSequence(7, (5, Misfortune.BREAK_ENGINE, 0), 3, sampling))
        eventually(lambda: not is_running(bridge._process.pid))  # our loop stands still meanwhile
        bridge.send(Ping(1))
        (failed,) = [r for r in await bridge.receive() if isinstance(r, EngineFailed)]
        assert failed.seq_ids == (7,)
        assert await bridge.receive() == []
    finally:
        bridge.kill()


async def test_a_hung_engine_is_replaced() -> None:
    """It answers no ping within the limit, so it is killed."""
    async with supervised(Listening(hang_limit_s=0.3)) as listening:
        listening.add(5, Misfortune.HANG, 0)
        await listening.until(starts=2, deaths=1)
        assert "hang limit" in listening.deaths[0].reason


async def test_idle_and_paused_engines_are_alive() -> None:
    """Without steps, pongs show that the loop turns, also when the hang limit is over."""
    limit_s = 3.0
    async with supervised(Listening(hang_limit_s=limit_s)) as listening:
        listening.supervisor.send(SetPaused(True))
        listening.add(5, 6, 7)
        limit_at = time.monotonic() + limit_s

        async def is_heard_after_the_limit() -> bool:
            return listening.watch.heard_at > limit_at

        await eventually_async(is_heard_after_the_limit)
        assert listening.watch.is_alive(time.monotonic())
        assert (listening.deaths, listening.outcomes) == ([], [])
        listening.supervisor.send(SetPaused(False))
        await listening.until(tokens=10)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("/nonexistent/engine",), "No such file"),
        (("/bin/false",), "exited with status 1 while loading"),
        ((*FAKE_ENGINE, "--load-s", "-1"), "ValueError: sleep length"),
    ],
)
async def test_a_first_start_that_fails_has_its_reason(argv: tuple[str, ...], reason: str) -> None:
    """The settings are wrong, so nobody tries again."""
    with pytest.raises(EngineStartFailed, match=reason):
        await Listening(argv).supervisor.start()


async def test_no_child_is_left_behind() -> None:
    """An engine in a long step is killed when the grace is over."""
    listening = Listening((*FAKE_ENGINE, "--step-s", "600"))
    async with supervised(listening):
        listening.add(5, 6, 7)
        bridge = listening.supervisor._bridge
        assert bridge is not None
        pid = bridge._process.pid
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIG_DFL)
        pytest.fail(f"engine {pid} still runs")


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("killed by signal 9", "killed by signal 9"),
        ("ValueError: 'the secret' is no number", "ValueError: … is no number"),
        ("IndexError: [5, 6, 7] at 3\nmore", "IndexError: … at 3"),
        ("RuntimeError: 'cut short", "RuntimeError: …"),
        ("x" * 1000, "x" * 200),
    ],
)
def test_the_cause_of_a_death_quotes_nothing(reason: str, cause: str) -> None:
    """Dead letters are read by operators: an exception is told without what it stumbled over."""
    assert EngineDeath(reason, None).cause == cause
