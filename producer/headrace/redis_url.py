"""The address of a Redis: what its URL may say, and how it is shown without its secrets."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import redis

from headrace.errors import ConfigurationError
from headrace.sentinel import (
    AsyncMaster,
    AsyncTlsMaster,
    Master,
    SentinelAddress,
    Sentinels,
    TlsMaster,
)

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
SENTINEL_PORT = 26379

# Options that redis-py would take from the URL although they are set here; other values, such as
# decoded replies or a short socket timeout, break the client.
_OWN_OPTIONS = frozenset(
    {
        *("decode_responses", "encoding", "legacy_responses", "single_connection_client"),
        *("socket_timeout", "socket_connect_timeout", "timeout", "health_check_interval"),
        *("max_connections", "retry", "retry_on_timeout", "retry_on_error"),
    }
)
_FILE_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TLS_OPTION = "ssl_"
_SENTINEL_OPTION = "sentinel_"
_SENTINEL_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]@/]+)(?::(\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A checked address, ready for redis-py; ``repr`` shows no secret."""

    url: str = field(repr=False)  # for redis-py; of a Sentinel URL, all but the master's host
    shown: str  # for logs and errors
    sentinels: Sentinels | None  # who knows the master; None where the URL names it

    @classmethod
    def parse(cls, url: str) -> RedisUrl:
        """Check a URL; raises ConfigurationError, whose text holds no secret."""
        text, shown = str(url), shown_url(str(url))
        scheme, _, place = text.partition("://")
        if not isinstance(url, str) or scheme not in SCHEMES or not place:
            names = ", ".join(f"{name}://" for name in SCHEMES[:-1])
            raise ConfigurationError(f"{shown!r} must begin with {names} or {SCHEMES[-1]}://")
        try:
            is_sentinel = scheme.endswith("+sentinel")
            plain, sentinels = _of_sentinels(text) if is_sentinel else (text, None)
            redis.ConnectionPool.from_url(plain)
        except (ValueError, AttributeError, TypeError) as error:
            # What redis-py says may quote a piece of the password.
            why = "" if _has_secret(text) else f": {error}"
            raise ConfigurationError(f"{shown!r} is not the URL of a Redis{why}") from None
        _check_options(plain)
        return cls(plain, shown, sentinels)

    def asyncio_options(self) -> dict[str, Any]:
        """Return what redis-py's asyncio pools need beside the URL."""
        if self.sentinels is None:
            return {}
        kind = AsyncTlsMaster if self.sentinels.has_tls else AsyncMaster
        return {"connection_class": kind, "sentinels": self.sentinels}

    def sync_options(self) -> dict[str, Any]:
        """Return what redis-py's blocking pools need beside the URL."""
        if self.sentinels is None:
            return {}
        kind = TlsMaster if self.sentinels.has_tls else Master
        return {"connection_class": kind, "sentinels": self.sentinels}


def shown_url(url: str) -> str:
    """Return the URL without user, password, or any option that is a password."""
    bare = re.sub(r"^([\w+]+://)?.*@", r"\1…@", url, flags=re.DOTALL)
    return re.sub(r"(password=)[^&]*", r"\1…", bare, flags=re.DOTALL)


def _has_secret(url: str) -> bool:
    return "@" in url or "password=" in url


def _of_sentinels(url: str) -> tuple[str, Sentinels]:
    """Split ``redis+sentinel://user:password@host:port,host/service/db?option=value``.

    Returns the URL of a master without a host, and who knows the host. The form is what users of
    redis-py know, which itself has no URL for Sentinel. Raises ValueError.
    """
    parts = urlsplit(url)
    userinfo, at, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("the name of the master is missing: …host:26379/mymaster")
    if database and not database.isdigit():
        raise ValueError(f"{database!r} is not the number of a database")
    options = parse_qsl(parts.query, keep_blank_values=True)
    own = {name: value for name, value in options if name.startswith(_SENTINEL_OPTION)}
    if unknown := own.keys() - _SENTINEL_OPTIONS:
        raise ValueError(f"unknown option {min(unknown)}")
    rest = [(name, value) for name, value in options if name not in own]
    # Always redis://, because redis-py prefers the connection class of rediss:// to ours.
    plain = f"redis://{userinfo}{at}sentinel/{database or 0}?{urlencode(rest)}"
    read = redis.ConnectionPool.from_url(plain).connection_kwargs
    tls = {name: value for name, value in read.items() if name.startswith(_TLS_OPTION)}
    return plain, Sentinels(
        [_address(host) for host in hosts.split(",")],
        service,
        username=own.get("sentinel_username"),
        password=own.get("sentinel_password"),
        tls_options=tls if parts.scheme.startswith("rediss") else None,
    )


def _address(text: str) -> SentinelAddress:
    found = _HOST.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not the host of a Sentinel")
    return found[1].strip("[]"), int(found[2] or SENTINEL_PORT)


def _check_options(url: str) -> None:
    for name, value in parse_qsl(urlsplit(url).query, keep_blank_values=True):
        if name in _OWN_OPTIONS:
            raise ConfigurationError(f"{name} in the URL of Redis is the client's to choose")
        # A missing file would look like an unreachable server, and be waited for.
        if name in _FILE_OPTIONS and not Path(value).is_file():
            raise ConfigurationError(f"{name} in the URL of Redis: there is no file {value!r}")
