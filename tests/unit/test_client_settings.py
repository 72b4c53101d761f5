"""What a client refuses to be made with; all of it before any I/O."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace import AsyncClient, Client, ConfigurationError, InvalidRequest, Timeout
from headrace.core import check_after
from headrace.groups import merge_statuses
from headrace.types import RequestState, RequestStatus

NOWHERE = "redis://127.0.0.1:1/0"

BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"url": "localhost:6379"}, "'localhost:6379'"),
    ({"url": "http://localhost"}, "http://localhost"),
    ({"url": 6379}, "6379"),
    ({"url": f"{NOWHERE}?decode_responses=true"}, "decode_responses"),
    ({"url": f"{NOWHERE}?db=1&socket_timeout=1"}, "socket_timeout"),
    ({"url": f"{NOWHERE}?max_connections=5"}, "max_connections"),
    ({"queue": ""}, "queue name ''"),
    ({"queue": "a{b}"}, "a{b}"),
    ({"tenant": "a b"}, "'a b'"),
    ({"timeout": 30}, "Timeout(total=30)"),
    ({"result_ttl": 0}, "result_ttl"),
    ({"result_ttl": math.inf}, "result_ttl"),
    ({"max_queued": 0}, "max_queued"),
    ({"max_queued": True}, "max_queued"),
    ({"max_queued_per_tenant": 0}, "max_queued_per_tenant"),
    ({"max_connections": 1}, "max_connections"),
    ({"max_connections": 2.0}, "max_connections"),
]


@pytest.mark.parametrize("client", [AsyncClient, Client])
@pytest.mark.parametrize(("settings", "named"), BAD_SETTINGS, ids=[str(s) for s, _ in BAD_SETTINGS])
def test_bad_setting_is_refused_by_name(client: Any, settings: dict[str, Any], named: str) -> None:
    """A setting that cannot work is refused when the client is made."""
    with pytest.raises((ConfigurationError, InvalidRequest)) as caught:
        client(**({"url": NOWHERE} | settings))
    assert named in str(caught.value)


def test_password_stays_out_of_the_message() -> None:
    """A URL that is refused is shown without its password."""
    with pytest.raises(ConfigurationError) as caught:
        Client("http://user:secret@host/0")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("part", ["first_chunk", "between_chunks", "total", "redis"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, "5"])
def test_timeout_must_be_a_time(part: str, value: Any) -> None:
    """Each part of a timeout is a positive number of seconds, or None."""
    with pytest.raises(ConfigurationError, match=rf"Timeout\.{part}"):
        Timeout(**{part: value})


@pytest.mark.parametrize("make", [AsyncClient, Client])
def test_wrong_argument_is_refused_without_redis(make: Any) -> None:
    """A stream's arguments are checked when it is made, though nobody listens at the address."""
    with pytest.raises(InvalidRequest, match="top_p"):
        make(NOWHERE).stream("Hi", top_p=2)


@pytest.mark.parametrize("make", [AsyncClient, Client])
def test_a_number_is_no_timeout(make: Any) -> None:
    """Which of four it would be is not guessed; the message says what to write instead."""
    client = make(NOWHERE)
    for ask in (client.stream, client.attach):
        with pytest.raises(ConfigurationError, match=r"such as Timeout\(total=5\), not 5"):
            ask("Hi", timeout=5)


@pytest.mark.parametrize("after", [-1, 1.5, True, None, "3", [0, -1], [None]])
def test_offset_must_be_a_count(after: object) -> None:
    """An offset to read on from is a count of tokens, or several."""
    with pytest.raises(InvalidRequest, match="after must be a count"):
        check_after(after)


def test_one_offset_or_many() -> None:
    """One offset and several are both lists afterwards."""
    assert check_after(3) == (3,)
    assert check_after([1, 2]) == (1, 2)


def _status(state: RequestState, **fields: Any) -> RequestStatus:
    base = RequestStatus("r/0", state, 2, 1, 0, 5, None, 10.0, finished_at_s=20.0)
    return RequestStatus(**{**{f: getattr(base, f) for f in base.__slots__}, **fields})


@pytest.mark.parametrize(
    ("states", "together"),
    [
        ("finished finished", "finished"),
        ("finished queued", "queued"),
        ("queued running", "running"),
        ("finished failed", "failed"),
        ("cancelled finished", "cancelled"),
        ("failed running", "running"),
    ],
)
def test_group_is_as_far_as_its_slowest(states: str, together: str) -> None:
    """A group runs while any member runs, and has ended well only if all have."""
    members = [_status(RequestState(state)) for state in states.split()]
    merged = merge_statuses("r", members)
    assert (merged.request_id, merged.state) == ("r", RequestState(together))
    assert merged.num_tokens == 4
    assert (merged.finished_at_s is not None) == merged.state.is_terminal
