"""How the ranks of one machine meet: at a store on loopback, then in one group for collectives.

Nothing here can be reached from outside the machine: store and group use the loopback interface,
unless the environment names another one for the group.
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not marked so

from headrace_worker.model.ranks import Ranks

# Loading takes the ranks different times; a rank that hangs in a step is noticed by the supervisor.
_TIMEOUT = timedelta(minutes=30)
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def listen() -> socket.socket:
    """Return the socket at which the first rank's store will be found; its port is free."""
    return socket.create_server(("127.0.0.1", 0))


def open_store(port: int, size: int, listener: socket.socket | None) -> TCPStore:
    """Join the store at a port; who brings the listening socket, which it then owns, serves it."""
    return TCPStore(
        "127.0.0.1",
        port,
        world_size=size,
        is_master=listener is not None,
        wait_for_workers=False,
        timeout=_TIMEOUT,
        master_listen_fd=listener.detach() if listener else None,
    )


def meet(
    rank: int, size: int, port: int, device: torch.device, listener: socket.socket | None = None
) -> Ranks:
    """Return this process's view of all ranks once each of them is here.

    The first rank brings the listening socket. A process can do this once.
    """
    use_loopback()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels and collectives are launched on the current one
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=open_store(port, size, listener),
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
    )
    return Ranks(rank, size, distributed.group.WORLD)


def use_loopback() -> None:
    """Keep collectives of this process on loopback: by default they bind to the host's address."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, _LOOPBACK)
