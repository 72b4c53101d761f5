"""The processes of the other ranks: started, told what to do, watched, never left behind.

Orders are written by the thread that steps; what a rank answers, and its end, is waited for by a
thread of its own. A rank ends in one of two ways: we stop it, or all end with it.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from headrace_worker.engine.channel import Channel, ChannelClosed
from headrace_worker.engine.messages import EngineFailed
from headrace_worker.engine.orders import Order

RANK_COMMAND = (sys.executable, "-m", "headrace_worker.engine.rank")
_EXPLANATION_S = 2.0  # longest wait for what became of a rank that left a step


@dataclass(frozen=True, slots=True)
class _Member:
    """One other rank."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel


class RankGroup:
    """All ranks but the first, which owns them."""

    def __init__(self, on_loss: Callable[[str], None]) -> None:
        self._on_loss = on_loss  # called on a watching thread with what became of a rank
        self._members: list[_Member] = []
        self._watchers: list[threading.Thread] = []
        self._is_stopping = False
        self._loss: str | None = None  # what became of the first rank that was lost
        self._has_loss = threading.Event()

    def start(self, size: int) -> None:
        """Start ranks 1 … size - 1; they get ready while we go on, and wait for orders."""
        for rank in range(1, size):
            member = _start(rank)
            watcher = threading.Thread(
                target=self._watch, args=(member,), name=f"rank-{rank}-watch", daemon=True
            )
            self._members.append(member)
            self._watchers.append(watcher)
            watcher.start()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes, in the order of ranks."""
        return tuple(member.process.pid for member in self._members)

    def order(self, order: Order) -> None:
        """Tell every rank the same; raises ChannelClosed when one is gone."""
        for member in self._members:
            member.channel.send(order)

    def order_each(self, make_order: Callable[[int], Order]) -> None:
        """Tell every rank something of its own; raises ChannelClosed when one is gone."""
        for member in self._members:
            member.channel.send(make_order(member.rank))

    def explain(self) -> str | None:
        """Return what became of a rank, for whom a collective has failed; None: all seem to live.

        The collective may be cut off a moment before the process has ended.
        """
        self._has_loss.wait(_EXPLANATION_S)
        return self._loss

    def stop(self) -> None:
        """End all ranks, wherever they are; they hold nothing that is not lost with us anyway."""
        self._is_stopping = True
        for member in self._members:
            member.process.kill()
        for watcher in self._watchers:
            watcher.join()

    def _watch(self, member: _Member) -> None:
        reason = _last_words(member.channel)
        status = member.process.wait()
        if self._is_stopping:
            return
        self._loss = f"rank {member.rank}: {reason or _describe(status)}"
        self._has_loss.set()
        self._on_loss(self._loss)


def _start(rank: int) -> _Member:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*RANK_COMMAND, "--fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    return _Member(rank, process, Channel(ours))


def _last_words(channel: Channel) -> str | None:
    """Wait for a rank's end; return its own account of it, if it gives one."""
    reason = None
    with suppress(ChannelClosed):
        while True:
            for message in channel.receive():
                if isinstance(message, EngineFailed):
                    reason = message.message
    return reason


def _describe(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exited with status {status}"
