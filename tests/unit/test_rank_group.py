"""The other ranks' processes are watched, their end is told, and none is left behind."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace_worker.engine.channel import ChannelClosed
from headrace_worker.engine.orders import RunLogits
from headrace_worker.engine.rank_group import RankGroup
from support.process_tree import children_of, is_running, num_threads
from support.waiting import PATIENCE_S, eventually

PARENT = """
from headrace_worker.engine.rank_group import RankGroup
group = RankGroup(print)
group.start(2)
print(*group.pids, flush=True)
input()
"""


class Losses(queue.Queue[str]):
    """What a group said of ranks that were lost."""

    def next(self) -> str:
        """Wait for the next one."""
        return self.get(timeout=PATIENCE_S)


@contextmanager
def started(size: int = 2) -> Iterator[tuple[RankGroup, Losses]]:
    """Give the other ranks of an engine, and what is heard of them."""
    losses = Losses()
    group = RankGroup(losses.put)
    group.start(size)
    try:
        yield group, losses
    finally:
        group.stop()


def test_a_rank_that_is_killed_is_told_with_its_signal() -> None:
    """The one that is meant, of several."""
    with started(3) as (group, losses):
        os.kill(group.pids[1], signal.SIGKILL)
        assert losses.next() == "rank 2: killed by signal 9"


def test_a_rank_that_cannot_go_on_says_why() -> None:
    """Its own words are told, not its exit status."""
    with started() as (group, losses):
        group.order(RunLogits(1))
        assert losses.next() == "rank 1: ValueError: the first order is a RunLogits, not to join"


def test_an_order_to_a_rank_that_is_gone_is_refused() -> None:
    """Nobody waits for what will never be computed."""
    with started() as (group, losses):
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(ChannelClosed):
            eventually(lambda: group.order(RunLogits(1)))
        assert group.explain() == losses.next() == "rank 1: killed by signal 9"


def test_ranks_that_are_stopped_are_gone_and_no_loss() -> None:
    """After stop there is no process, not even a dead one, and nothing was told."""
    with started(3) as (group, losses):
        pids = group.pids
        assert sorted(pids) == sorted(set(children_of(os.getpid())) & set(pids))
        group.stop()
        assert not set(children_of(os.getpid())) & set(pids)
        assert losses.empty()


@pytest.mark.parametrize("state", [signal.SIGCONT, signal.SIGSTOP], ids=["awake", "stopped"])
def test_a_rank_dies_with_its_parent(state: signal.Signals) -> None:
    """However the first rank ends, and even if the other cannot run a thread to notice."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    eventually(lambda: num_threads(pid) > 1)  # it watches its parent from now on
    os.kill(pid, state)
    parent.kill()
    parent.communicate()
    eventually(lambda: not is_running(pid))
