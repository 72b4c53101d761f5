"""Keeping a server busy with a function that never ends, until it is told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from support.servers import Server
from support.waiting import eventually

NEVER_ENDS = """#!lua name=somebody_elses
redis.register_function('spin', function() while true do end end)
"""
SOON = {"busy-reply-threshold": "20"}  # ms of a function after which the others hear of it


@contextmanager
def kept_busy(server: Server) -> Iterator[None]:
    """Have everybody told BUSY inside; the server must have been started with ``SOON``."""
    retry = Retry(NoBackoff(), 0)
    with redis.Redis(unix_socket_path=str(server.socket_path), retry=retry) as client:
        client.function_load(NEVER_ENDS, replace=True)
        spinning = threading.Thread(target=_spin, args=(server,))
        spinning.start()
        try:
            eventually(lambda: _is_busy(client))
            yield
        finally:
            client.function_kill()
            spinning.join()


def _spin(server: Server) -> None:
    with server.connect() as client:
        try:
            client.fcall("spin", 0)
        except redis.ResponseError:  # killed, as it was meant to be
            return


def _is_busy(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.ResponseError as error:
        return str(error).startswith("BUSY")
    return False
