"""The engine as a process of its own: ``python -m headrace_worker.engine.process --fd N``.

Life: settings in → EngineReady out → loop of commands in, one outcome a step out → Shutdown or end
of the channel. A loader that cannot start, or a step that breaks the engine, ends it with
EngineFailed and exit status 1. Signals are ignored, because the parent decides: it drains first,
and a terminal's Ctrl-C reaches the whole process group.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import NoReturn

from headrace_worker.engine.channel import Channel, ChannelClosed
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.errors import EngineRefused, EngineStepError, SettingsError
from headrace_worker.engine.framing import Message
from headrace_worker.engine.messages import (
    AbortSequences,
    AddSequence,
    Bystanders,
    EngineFailed,
    EngineReady,
    Ping,
    Pong,
    SetPaused,
    SetPriority,
    Shutdown,
)
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.garbage import spare_the_living

Loader = Callable[[EngineSettings, Channel], tuple[Engine, EngineReady]]
_PEER_GONE = getattr(select, "POLLRDHUP", 0)  # POLLHUP and POLLERR are always reported


def main() -> int:
    """Run the real engine over the inherited socket."""
    parser = argparse.ArgumentParser(description="The engine process; its parent is the worker.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the parent")
    fd = parser.parse_args().fd
    with ExitStack() as cleanup:
        return run(fd, lambda settings, channel: _load_model_engine(settings, channel, cleanup))


def run(fd: int, load: Loader) -> int:
    """Serve the parent at the other end of ``fd`` until it is done; return the exit status."""
    ignore_signals()
    exit_with_parent(fd)
    channel = Channel(socket.socket(fileno=fd))
    try:
        settings, *commands = channel.receive()
        if not isinstance(settings, EngineSettings):
            raise ValueError(f"the first message is a {type(settings).__name__}, not the settings")
        engine, ready = load(settings, channel)
        spare_the_living()
        channel.send(ready)
        serve(engine, channel, commands)
    except ChannelClosed:
        return 1  # nobody is left to tell
    except EngineRefused as error:  # a trace would show where it was noticed, which helps nobody
        channel.send(EngineFailed(str(error), ()))
        return 1
    except Exception as error:  # the process entry: the parent must hear it, whatever it is
        traceback.print_exc()
        seq_ids = error.sequence_ids if isinstance(error, EngineStepError) else ()
        channel.send(EngineFailed(f"{type(error).__name__}: {error}", seq_ids))
        return 1
    return 0


def serve(engine: Engine, channel: Channel, commands: list[Message]) -> None:
    """Take commands and step until Shutdown; sleeps on the channel when there is nothing to do."""
    is_paused = False
    engine.on_bystanders = lambda seq_ids: channel.send(Bystanders(seq_ids))
    while True:
        for command in commands:
            match command:
                case AddSequence():
                    engine.add(command)
                case AbortSequences(seq_ids):
                    engine.abort(seq_ids)
                case SetPriority(seq_id, priority):
                    engine.reprioritise(seq_id, priority)
                case SetPaused(paused):
                    is_paused = paused
                case Ping(nonce):
                    channel.send(Pong(nonce, engine.num_steps))
                case Shutdown():
                    return
                case _:
                    raise ValueError(f"{type(command).__name__} is not a command")
        engine.take_grammars()
        can_step = engine.has_work and not is_paused
        if can_step:
            channel.send(engine.step())
        commands = channel.poll() if can_step else channel.receive(or_until=engine.grammars)


def ignore_signals() -> None:
    """Leave it to the parent when this process ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def leave(status: int) -> NoReturn:
    """End this process now that all is said, without what libraries do when Python ends.

    Those of CUDA wait there for a device that may be broken, and NCCL's for ranks that are gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def exit_with_parent(fd: int) -> None:
    """Watch the channel from a sleeping thread, so that no hung step outlives the parent."""
    watch = select.poll()
    watch.register(fd, _PEER_GONE)

    def wait_and_exit() -> None:
        watch.poll()
        os._exit(1)

    threading.Thread(target=wait_and_exit, name="parent-watch", daemon=True).start()


def _load_model_engine(
    settings: EngineSettings, channel: Channel, cleanup: ExitStack
) -> tuple[Engine, EngineReady]:
    from headrace_worker.engine.loader import load_engine  # imports torch
    from headrace_worker.model.errors import ModelLoadError

    def give_up(reason: str) -> None:
        """A rank is gone: say so and end, as the step under way waits for it, perhaps for ever."""
        with suppress(ChannelClosed):
            channel.send(EngineFailed(reason, ()))
        os._exit(1)

    try:
        if settings.tensor_parallel_size == 1:
            return load_engine(settings)
        from headrace_worker.engine.parallel import load_leading

        return load_leading(settings, give_up, cleanup)
    except (ModelLoadError, SettingsError) as error:
        raise EngineRefused(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    leave(main())
