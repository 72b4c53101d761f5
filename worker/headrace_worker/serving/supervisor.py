"""The supervisor keeps one engine running: starts it, listens, notices death or silence, restarts.

When an engine dies this process is still there and knows who was in the batch, so it tells the
queue at once instead of letting leases run out. Only the first start may fail for good: then the
settings are wrong. Later failures may pass, so a start is tried again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace_worker import logs
from headrace_worker.backoff import Backoff
from headrace_worker.engine.messages import (
    Bystanders,
    Command,
    EngineFailed,
    EngineReady,
    Ping,
    Report,
    StepOutcome,
)
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.serving.bridge import EngineBridge, EngineStartFailed
from headrace_worker.serving.progress import ProgressWatch

STOP_GRACE_S = 0.3
MAX_CAUSE_CHARS = 200

# An exception may quote what it stumbled over: strings, and token ids in brackets.
_QUOTED = re.compile(r"'[^']*'?|\"[^\"]*\"?|\[[^\]]*\]?|\([^)]*\d[^)]*\)?")


@dataclass(frozen=True, slots=True)
class EngineDeath:
    """How an engine ended."""

    reason: str  # an exit signal or status, or an exception; for the log of this worker
    seq_ids: tuple[int, ...] | None  # sequences of the batch; None: it had no time to say
    bystanders: tuple[int, ...] = ()  # not in the batch for sure; for when it could not say

    @property
    def cause(self) -> str:
        """Return the reason as others may read it: one short line, without what it quotes."""
        first_line = self.reason.partition("\n")[0]
        return _QUOTED.sub("…", first_line)[:MAX_CAUSE_CHARS]


class EngineListener(Protocol):
    """What is told of starts, steps and deaths of the engine."""

    def engine_started(self, ready: EngineReady) -> None:
        """The model is loaded and nothing is in the engine."""
        ...

    def engine_stepped(self, outcome: StepOutcome) -> None:
        """One step is over."""
        ...

    async def engine_died(self, death: EngineDeath) -> None:
        """Nothing is in any engine any more; the next one starts when this returns."""
        ...


class Supervisor:
    """Owns the bridge and the watch; everything is touched on the event loop only."""

    def __init__(
        self,
        argv: Sequence[str],
        settings: EngineSettings,
        *,
        watch: ProgressWatch,
        look_every_s: float,
        backoff: Backoff,
        clock: Callable[[], float],
    ) -> None:
        self._argv = argv
        self._settings = settings
        self._watch = watch
        self._look_every_s = look_every_s
        self._backoff = backoff
        self._clock = clock
        self._bridge: EngineBridge | None = None
        self._num_pings = 0
        self._stall: str | None = None  # the reason, set when we killed it for its silence
        self._bystanders: tuple[int, ...] = ()  # in the engine, but not in its step
        self._log = logs.get_logger()

    async def start(self) -> EngineReady:
        """Start the first engine; raises EngineStartFailed with its reason."""
        self._bystanders = ()
        self._bridge = await EngineBridge.start(self._argv, self._settings)
        ready = await self._bridge.wait_ready()
        self._watch.engine_started(self._clock())
        return ready

    async def run(self, ready: EngineReady, listener: EngineListener) -> None:
        """Serve the started engine and its successors until cancelled."""
        while True:
            listener.engine_started(ready)
            death = await self._listen(listener)
            self._watch.engine_gone()
            self._log.error(logs.ENGINE_STEP_FAILED, reason=death.reason)
            await listener.engine_died(death)
            ready = await self._restart()

    async def watch(self) -> None:
        """Ping the engine, and kill it when it has been silent for too long; until cancelled."""
        while True:
            await asyncio.sleep(self._look_every_s)
            now = self._clock()
            self._watch.look(now)
            if self._watch.is_hung(now) and self._bridge is not None:
                self._log.error(logs.ENGINE_STALLED)
                self._stall = "no sign of life within the hang limit"
                self._watch.engine_gone()
                self._bridge.kill()
            else:
                self._num_pings += 1
                self.send(Ping(self._num_pings))

    def send(self, command: Command) -> None:
        """Tell the engine; without one the command is dropped, and its request handed back."""
        if self._bridge is not None:
            self._bridge.send(command)

    async def stop(self) -> None:
        """Leave no child behind."""
        if self._bridge is not None:
            await self._bridge.stop(STOP_GRACE_S)

    def kill(self) -> None:
        """End the child at once."""
        if self._bridge is not None:
            self._bridge.kill()

    async def _listen(self, listener: EngineListener) -> EngineDeath:
        assert self._bridge is not None
        while reports := await self._bridge.receive():
            self._watch.reported(self._clock())
            for report in reports:
                if isinstance(report, EngineFailed):
                    return EngineDeath(report.message, report.seq_ids or None, self._bystanders)
                self._take(report, listener)
        reason, self._stall = self._stall or await self._bridge.exit_reason(), None
        return EngineDeath(reason, None, self._bystanders)

    def _take(self, report: Report, listener: EngineListener) -> None:
        match report:
            case StepOutcome():
                self._backoff.reset()
                listener.engine_stepped(report)
            case Bystanders(seq_ids):
                self._bystanders = seq_ids

    async def _restart(self) -> EngineReady:
        while True:
            await asyncio.sleep(self._backoff.next_delay_s())
            if self._bridge is not None:
                self._bridge.kill()
            try:
                return await self.start()
            except EngineStartFailed as error:
                self._log.error(logs.ENGINE_STEP_FAILED, reason=str(error))
