"""How long a reader waits: its clocks, and what it makes of a silence."""

from __future__ import annotations

import itertools

import pytest

from headrace.assembly import LogAssembly
from headrace.errors import (
    DeadlineExceeded,
    FirstChunkTimeout,
    InvalidRequest,
    RequestExpired,
    RequestLost,
    StreamStalled,
)
from headrace.patience import (
    FIRST_PROBE_S,
    LONGEST_DELAY_S,
    LONGEST_PROBE_S,
    Patience,
    delays_s,
    explain_silence,
)
from headrace.types import RequestState, RequestStatus, Timeout

LIMITS = Timeout(first_chunk=10, between_chunks=5, total=100)


def test_first_chunk_has_its_own_limit() -> None:
    """Before anything came, the time for the first chunk counts from the call."""
    patience = Patience(LIMITS, "r1", 1000.0)
    assert patience.verdict(1009.9) is None
    error = patience.verdict(1010.0)
    assert isinstance(error, FirstChunkTimeout)
    assert str(error) == "request 'r1': waited 10 s for the first chunk"


def test_after_the_first_chunk_silence_counts() -> None:
    """Once something came, the time since then counts, and the first limit no longer does."""
    patience = Patience(LIMITS, "r1", 1000.0)
    patience.heard(1009.0)
    assert patience.verdict(1013.9) is None
    assert isinstance(patience.verdict(1014.0), StreamStalled)


def test_time_spent_by_the_caller_is_not_silence() -> None:
    """A caller may take its time between two chunks; silence counts from its next question."""
    patience = Patience(LIMITS, "r1", 1000.0)
    patience.heard(1001.0)
    patience.wait_begins(1050.0)
    assert patience.verdict(1054.9) is None
    assert isinstance(patience.verdict(1055.0), StreamStalled)


def test_total_time_is_over_however_chunks_flow() -> None:
    """The total counts from the call, whatever came meanwhile."""
    patience = Patience(LIMITS, "r1", 1000.0)
    patience.heard(1099.9)
    patience.refuse_overtime(1099.9)
    assert isinstance(patience.verdict(1100.0), DeadlineExceeded)
    with pytest.raises(DeadlineExceeded):
        patience.refuse_overtime(1100.0)


def test_limits_may_be_none() -> None:
    """A limit of None never ends a wait."""
    patience = Patience(Timeout(first_chunk=None, between_chunks=None, total=None), "r1", 0.0)
    assert patience.verdict(1e9) is None
    patience.heard(1.0)
    patience.refuse_overtime(1e9)
    assert patience.verdict(1e9) is None


def test_silence_is_questioned_ever_more_rarely() -> None:
    """The first question comes after a second, later ones at growing distances, up to a cap."""
    patience = Patience(Timeout(first_chunk=None, total=None), "r1", 0.0)
    asked, now_s = [], 0.0
    while len(asked) < 8:
        now_s += patience.wait_s(now_s)
        assert patience.is_probe_due(now_s)
        asked.append(now_s)
    gaps = [b - a for a, b in itertools.pairwise([0.0, *asked])]
    assert gaps[0] == FIRST_PROBE_S
    assert gaps == sorted(gaps)
    assert gaps[-1] == LONGEST_PROBE_S


def test_doubt_is_questioned_at_once() -> None:
    """After an outage the status is asked for without delay, and once."""
    patience = Patience(LIMITS, "r1", 0.0)
    patience.doubt()
    assert patience.wait_s(0.0) == 0.0
    assert patience.is_probe_due(0.0)
    assert not patience.is_probe_due(0.0)


def test_wait_ends_when_the_nearest_clock_wants_attention() -> None:
    """A wait lasts until the next question or the next limit, and never a negative time."""
    patience = Patience(Timeout(first_chunk=0.25), "r1", 0.0)
    assert patience.wait_s(0.0) == 0.25
    assert patience.wait_s(0.5) == 0.0


def _status(state: RequestState, num_tokens: int) -> RequestStatus:
    return RequestStatus("r1", state, num_tokens, 1, 0, 5, None, 0.0)


def _log(after: int = 0, num_read: int = 0) -> LogAssembly:
    log = LogAssembly("r1", "log", after=after)
    log.num_tokens += num_read
    return log


@pytest.mark.parametrize("state", [RequestState.QUEUED, RequestState.RUNNING])
def test_request_under_way_is_waited_for(state: RequestState) -> None:
    """While a request waits or runs and nothing is missing, there is hope."""
    assert explain_silence(_status(state, 3), _log(num_read=3)) is None


@pytest.mark.parametrize(
    ("status", "log", "expected", "said"),
    [
        (None, _log(), RequestLost, "no longer knows"),
        (_status(RequestState.RUNNING, 5), _log(num_read=3), RequestLost, "tokens 3 to 5"),
        (_status(RequestState.FINISHED, 5), _log(num_read=3), RequestExpired, "finished"),
        (_status(RequestState.FAILED, 0), _log(), RequestExpired, "failed"),
        (_status(RequestState.FINISHED, 2), _log(num_read=3), RequestLost, "2 of 3 tokens"),
        (_status(RequestState.FINISHED, 2), _log(after=9), InvalidRequest, "after 9 lies beyond"),
    ],
)
def test_hopeless_silence_is_explained(
    status: RequestStatus | None, log: LogAssembly, expected: type[Exception], said: str
) -> None:
    """Lost, expired and beyond the end are different truths."""
    error = explain_silence(status, log)
    assert type(error) is expected
    assert said in str(error)


def test_delays_grow_to_a_cap() -> None:
    """The first try again comes at once, later ones after doubling pauses, for ever."""
    delays = list(itertools.islice(delays_s(), 20))
    assert delays[0] == 0.0
    assert delays[:8] == sorted(delays[:8])
    assert all(LONGEST_DELAY_S / 2 <= delay <= LONGEST_DELAY_S for delay in delays[9:])


def test_no_two_readers_come_back_at_the_same_moment() -> None:
    """After an outage their pauses differ, from the first one on."""
    second_tries = {list(itertools.islice(delays_s(), 2))[1] for _ in range(10)}
    assert len(second_tries) == 10
