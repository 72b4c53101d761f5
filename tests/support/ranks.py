"""Ranks in threads of one process, joined by torch's own gloo over loopback."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import ProcessGroupGloo, TCPStore

from headrace_worker.model.ranks import Ranks

TIMEOUT = timedelta(seconds=60)
T = TypeVar("T")


def on_ranks(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """Do the same work on each rank at once; return the results in the order of ranks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, fd = listener.getsockname()[1], os.dup(listener.fileno())

    def join_and_work(rank: int) -> T:
        return work(Ranks(rank, size, _join(rank, size, port, fd)))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(join_and_work, range(size)))


def _join(rank: int, size: int, port: int, fd: int) -> Any:  # torch has no type for both kinds
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = TCPStore(
        "127.0.0.1",
        port,
        world_size=size,
        is_master=rank == 0,
        wait_for_workers=False,
        timeout=TIMEOUT,
        master_listen_fd=fd if rank == 0 else None,
    )
    return ProcessGroupGloo(store, rank, size, TIMEOUT)
