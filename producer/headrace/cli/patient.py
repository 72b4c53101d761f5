"""Calls of commands that use no client: what Redis refuses for now is asked again for a while."""

from __future__ import annotations

import asyncio
import time

import redis.asyncio

from headrace import functions
from headrace.errors import TransportError
from headrace.functions import Call, T
from headrace.patience import delays_s
from headrace.types import Timeout

PATIENCE_S = Timeout().redis or 0.0


async def call(client: redis.asyncio.Redis, call: Call[T], *, patience_s: float = PATIENCE_S) -> T:
    """Call a function; raises TransportError.

    Only where nothing ran it is called again: a second answer to replay or purge would tell of
    entries that the first has taken away.
    """
    give_up_s = time.monotonic() + patience_s
    for delay_s in delays_s():
        try:
            return await functions.run(client, call)
        except TransportError as error:
            is_late = time.monotonic() + delay_s >= give_up_s
            if is_late or error.__cause__ is None or not functions.is_not_now(error.__cause__):
                raise
        await asyncio.sleep(delay_s)
    raise AssertionError("delays never end")
