"""The link's view of Redis: away, refusing some things, or well."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError

from headrace.errors import TransportError
from headrace_worker.transport.link import REFUSAL_LASTS_S, Link


class Clock:
    """A clock that the test turns."""

    now = 100.0

    def __call__(self) -> float:
        """Return the second."""
        return self.now


def failure(cause: Exception) -> TransportError:
    """Return what a call raises for a cause."""
    error = TransportError(str(cause))
    error.__cause__ = cause
    return error


def make_link(clock: Clock) -> Link:
    """Return a link that connects to nothing."""
    return Link(Redis(), 1.0, clock)


def test_any_success_ends_an_outage() -> None:
    """Out of reach is out of reach for all calls, and so is the return."""
    link = make_link(clock := Clock())
    link.lost("claim", failure(RedisConnectionError("gone")))
    assert not link.is_connected
    assert link.was_away_within(0.0)
    link.found("renew")
    assert link.is_connected
    assert link.was_away_within(5.0)
    clock.now += 6.0
    assert not link.was_away_within(5.0)


def test_what_is_refused_must_succeed_itself() -> None:
    """Renewals go through at full memory, and that does not make claims possible."""
    link = make_link(Clock())
    link.lost("claim", failure(OutOfMemoryError("full")))
    link.found("renew")
    assert not link.is_connected
    assert not link.was_away_within(5.0)
    link.found("claim")
    assert link.is_connected


@pytest.mark.parametrize(
    "cause",
    [
        ReadOnlyError("replica"),
        ResponseError("BUSY Valkey is busy running a script."),
        ResponseError("MISCONF Errors writing to the AOF file"),
    ],
)
def test_a_standstill_keeps_leases_from_their_holders(cause: Exception) -> None:
    """Where nothing is written no lease is renewed; nobody is to blame for those that ran out."""
    link = make_link(clock := Clock())
    link.lost("reap", failure(cause))
    clock.now += 4.0
    assert link.was_away_within(5.0)
    link.found("reap")
    clock.now += 2.0
    assert not link.was_away_within(5.0)


def test_a_refusal_that_nobody_repeats_is_forgotten() -> None:
    """A single call that Redis refused once does not keep the worker unready for ever."""
    link = make_link(clock := Clock())
    link.lost("release", failure(ReadOnlyError("replica")))
    link.found("renew")
    assert not link.is_connected
    clock.now += REFUSAL_LASTS_S
    link.found("renew")
    assert link.is_connected
