"""The lease keeper: renews what is held, only while the engine makes progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from headrace.errors import TransportError
from headrace.functions import Held
from headrace_worker.transport import lease
from headrace_worker.transport.lease import LeaseKeeper
from support.waiting import eventually_async

MINE, OTHER = Held("acme", "r1", 1), Held("acme", "r2", 4)


class Renewals:
    """Takes note of renewals, and answers by script."""

    def __init__(self) -> None:
        self.asked: list[tuple[Held, ...]] = []
        self.lost: tuple[Held, ...] = ()
        self.num_failures = 0

    async def renew(self, held: Sequence[Held]) -> tuple[Held, ...]:
        self.asked.append(tuple(held))
        if self.num_failures:
            self.num_failures -= 1
            raise TransportError("Redis: timeout")
        return self.lost


class Keeping:
    """A keeper with settable surroundings."""

    def __init__(self, lease_s: float = 0.02) -> None:
        self.renewals = Renewals()
        self.held: list[Held] = [MINE, OTHER]
        self.is_alive = True
        self.dropped: list[Held] = []
        self.keeper = LeaseKeeper(
            self.renewals,
            lease_s=lease_s,
            held=lambda: self.held,
            may_renew=lambda: self.is_alive,
            on_lost=self.dropped.append,
        )


@pytest.fixture
def keeping() -> Keeping:
    """Give a keeper of two requests, with a lease of 20 ms."""
    return Keeping()


async def test_all_that_is_held_is_renewed_in_one_call(keeping: Keeping) -> None:
    """One renewal names every request with its epoch."""
    await keeping.keeper.renew_once()
    assert keeping.renewals.asked == [(MINE, OTHER)]
    assert keeping.dropped == []


async def test_a_silent_engine_loses_its_leases(keeping: Keeping) -> None:
    """Without a sign of life nothing is renewed, so another worker can take over."""
    keeping.is_alive = False
    await keeping.keeper.renew_once()
    assert keeping.renewals.asked == []


async def test_holding_nothing_asks_nothing(keeping: Keeping) -> None:
    """An idle worker does not bother Redis."""
    keeping.held = []
    await keeping.keeper.renew_once()
    assert keeping.renewals.asked == []


async def test_lost_leases_are_told(keeping: Keeping) -> None:
    """Whoever lost its lease is dropped, the others stay."""
    keeping.renewals.lost = (OTHER,)
    await keeping.keeper.renew_once()
    assert keeping.dropped == [OTHER]


async def test_a_failed_renewal_is_followed_by_the_next(keeping: Keeping) -> None:
    """However often it fails, it is tried again at the next turn."""
    keeping.renewals.num_failures = 3
    running = asyncio.create_task(keeping.keeper.run())

    async def enough() -> bool:
        return len(keeping.renewals.asked) >= 4

    try:
        await eventually_async(enough)
    finally:
        running.cancel()


async def test_a_long_lease_is_renewed_soon_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not a quarter of the lease later: somebody with a shorter one may sweep before that."""
    monkeypatch.setattr(lease, "RETRY_S", 0.01)
    keeping = Keeping(lease_s=4)
    keeping.renewals.num_failures = 5
    running = asyncio.create_task(keeping.keeper.run())

    async def has_asked() -> bool:
        return len(keeping.renewals.asked) > 0

    async def has_renewed() -> bool:
        return len(keeping.renewals.asked) >= 6

    try:
        await eventually_async(has_asked)
        began_s = time.monotonic()
        await eventually_async(has_renewed)
        assert time.monotonic() - began_s < 4  # at the usual pace it would be five seconds
    finally:
        running.cancel()
