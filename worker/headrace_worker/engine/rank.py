"""One rank but the first, as a process: ``python -m headrace_worker.engine.rank --fd N``.

Life: JoinRanks in → its part of the model loaded → orders in, one after the other, until the first
rank is gone. It never outlives that one, however it dies and whatever this one is doing.
"""

from __future__ import annotations

import argparse
import ctypes
import signal
import socket
import sys
import traceback

from headrace_worker.engine.channel import Channel, ChannelClosed
from headrace_worker.engine.errors import EngineRefused
from headrace_worker.engine.messages import EngineFailed
from headrace_worker.engine.orders import JoinRanks
from headrace_worker.engine.process import exit_with_parent, ignore_signals, leave

_SIGNAL_AT_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG


def main() -> int:
    """Follow the first rank over the inherited socket; return the exit status."""
    parser = argparse.ArgumentParser(description="A rank of an engine; its parent is the first.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the parent")
    fd = parser.parse_args().fd
    ignore_signals()
    _die_with_parent()
    exit_with_parent(fd)
    channel = Channel(socket.socket(fileno=fd))
    try:
        _follow(channel)
    except ChannelClosed:
        pass  # nobody is left to follow, or to tell
    except EngineRefused as error:
        channel.send(EngineFailed(str(error), ()))
    except Exception as error:  # the process entry: the first rank must hear it, whatever it is
        traceback.print_exc()
        channel.send(EngineFailed(f"{type(error).__name__}: {error}", ()))
    return 1


def _follow(channel: Channel) -> None:
    from headrace_worker.engine.parallel import load_following  # imports torch, before it is asked

    first, *orders = channel.receive()
    if not isinstance(first, JoinRanks):
        raise ValueError(f"the first order is a {type(first).__name__}, not to join")
    decoder = load_following(first)
    while True:
        for order in orders:
            decoder.obey(order)
        orders = channel.receive()


def _die_with_parent() -> None:
    """Have Linux kill this process with its parent, even where it is stopped and runs no thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL)


if __name__ == "__main__":
    leave(main())
