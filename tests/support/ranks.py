"""Ranks in threads of one process, joined by torch's own gloo over loopback."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from torch.distributed import ProcessGroupGloo

from headrace_worker.engine.channel import Channel, ChannelClosed
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.leading import FollowingDecoder, LeadingDecoder
from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.messages import EngineReady
from headrace_worker.engine.orders import Order
from headrace_worker.engine.rendezvous import listen, open_store, use_loopback
from headrace_worker.engine.runner import ModelRunner
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.model import Decoder
from headrace_worker.model.ranks import Ranks

TIMEOUT = timedelta(seconds=60)
T = TypeVar("T")


def on_ranks(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """Do the same work on each rank at once; return the results in the order of ranks."""
    use_loopback()
    with listen() as listener, ThreadPoolExecutor(size) as threads:
        port = listener.getsockname()[1]
        return list(threads.map(lambda r: work(_join(r, size, port, listener)), range(size)))


@contextmanager
def cut_engine(settings: EngineSettings, size: int) -> Iterator[tuple[Engine, EngineReady]]:
    """Give an engine whose model is cut over so many ranks; this thread is the first one."""
    use_loopback()
    pairs = [socket.socketpair() for _ in range(1, size)]
    ours = [Channel(pair[0]) for pair in pairs]

    def order(order: Order) -> None:
        for channel in ours:
            channel.send(order)

    with listen() as listener, ThreadPoolExecutor(size) as threads:
        port = listener.getsockname()[1]
        first = threads.submit(_join, 0, size, port, listener)
        others = [
            threads.submit(
                _follow, partial(_join, rank, size, port, listener), settings, Channel(pair[1])
            )
            for rank, pair in enumerate(pairs, start=1)
        ]
        ranks = first.result()
        try:
            lead = partial(LeadingDecoder, ranks=ranks, order=order, explain=lambda: None)
            yield load_engine(settings, ranks, lead)
        finally:
            for pair in pairs:
                pair[0].close()
        for other in others:
            other.result()


def _follow(join: Callable[[], Ranks], settings: EngineSettings, channel: Channel) -> None:
    ranks = join()
    runner = load_engine(settings, ranks)[0].runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.decoder, Decoder)
    decoder = FollowingDecoder(runner.decoder, runner.backend, ranks)
    with suppress(ChannelClosed):
        while True:
            for order in channel.receive():
                decoder.obey(order)


def _join(rank: int, size: int, port: int, listener: socket.socket) -> Ranks:
    store = open_store(port, size, None if rank else listener)
    group: Any = ProcessGroupGloo(store, rank, size, TIMEOUT)  # torch has no type for all groups
    return Ranks(rank, size, group)
