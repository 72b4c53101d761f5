"""URLs of Redis: what each form means to redis-py, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.connections import ConnectionSettings
from headrace.errors import ConfigurationError
from headrace.redis_url import RedisUrl, shown_url

SENTINELS = "redis+sentinel://user:secret@a:26380,b,[::1]:7/main/3?sentinel_password=other"


def test_a_plain_url_stays_what_it_is() -> None:
    """Nothing is added, and nobody is asked for a master."""
    url = RedisUrl.parse("rediss://user:secret@queue:6380/2?ssl_ciphers=X")
    assert url.url == "rediss://user:secret@queue:6380/2?ssl_ciphers=X"
    assert url.sentinels is None
    assert url.asyncio_options() == url.sync_options() == {}


def test_a_sentinel_url_names_sentinels_service_and_database() -> None:
    """Hosts have 26379 as their port by default; login and options are those of the master."""
    url = RedisUrl.parse(SENTINELS)
    assert url.sentinels is not None
    assert url.sentinels.addresses == (("a", 26380), ("b", 26379), ("::1", 7))
    assert url.sentinels.service == "main"
    assert url.url == "redis://user:secret@sentinel/3?"


@pytest.mark.parametrize(("scheme", "has_tls"), [("redis", False), ("rediss", True)])
def test_sentinels_are_reached_as_their_master_is(scheme: str, has_tls: bool) -> None:
    """rediss+sentinel:// encrypts both connections."""
    url = RedisUrl.parse(f"{scheme}+sentinel://a/main")
    settings = ConnectionSettings(f"{scheme}+sentinel://a/main", 2)
    makers: list[Any] = [settings.commands(), settings.commands_sync()]
    kinds = [maker.connection_pool.connection_class for maker in makers]
    assert url.sentinels is not None
    assert url.sentinels.has_tls is has_tls
    assert [kind.__name__ for kind in kinds] == (
        ["AsyncTlsMaster", "TlsMaster"] if has_tls else ["AsyncMaster", "Master"]
    )


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://queue", "must begin with"),
        ("redis://", "must begin with"),
        (None, "must begin with"),
        ("redis+sentinel://a", "name of the master is missing"),
        ("redis+sentinel:///main", "'' is not the host of a Sentinel"),
        ("redis+sentinel://a:1:2/main", "'a:1:2' is not the host"),
        ("redis+sentinel://a/main/x", "'x' is not the number of a database"),
        ("redis+sentinel://a/main?sentinel_quorum=2", "unknown option sentinel_quorum"),
        ("redis://queue?socket_timeout=1", "socket_timeout in the URL"),
        ("redis+sentinel://a/main?max_connections=1", "max_connections in the URL"),
    ],
)
def test_a_wrong_url_is_refused_by_name(url: Any, why: str) -> None:
    """The error says what is wrong with it."""
    with pytest.raises(ConfigurationError, match=why):
        RedisUrl.parse(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@queue/0", "redis://…@queue/0"),
        ("redis://:se@cret@queue/0", "redis://…@queue/0"),
        (SENTINELS, "redis+sentinel://…@a:26380,b,[::1]:7/main/3?sentinel_password=…"),
        ("unix:///q.sock?password=secret&db=1", "unix:///q.sock?password=…&db=1"),
        ("secret@queue", "…@queue"),
        ("redis://queue/0", "redis://queue/0"),
    ],
)
def test_urls_are_shown_without_login(url: str, shown: str) -> None:
    """What is logged holds the place and no secret."""
    assert shown_url(url) == shown


def test_whoever_answered_is_asked_first_and_whoever_is_asked_goes_last() -> None:
    """A Sentinel that hangs is not asked first again and again."""
    sentinels = RedisUrl.parse("redis+sentinel://a,b,c/main").sentinels
    assert sentinels is not None
    turns = sentinels._in_turn()
    assert next(turns)[0] == "a"  # it hangs, and the question is cancelled
    assert [host for host, _ in sentinels._in_turn()] == ["b", "c", "a"]
    assert sentinels._found(("c", 26379), [b"10.0.0.7", b"6379"]) == ("10.0.0.7", 6379)
    assert next(sentinels._in_turn())[0] == "c"
