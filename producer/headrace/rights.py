"""Who may do what in Redis: the ACL rules of each kind of user, as docs/security.md explains them.

A function runs with the rights of its caller, so who may enqueue needs the commands that enqueue
uses. Rights are named one by one, because Redis's categories hold more than they seem to:
``@connection`` has CLIENT PAUSE, which stops the server for everybody.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from headrace.errors import ConfigurationError
from headrace.keys import Keys, check_tenant

Rules = tuple[str, ...]


class Role(StrEnum):
    """A kind of user."""

    PRODUCER = "producer"
    READER = "reader"
    WORKER = "worker"
    OPERATOR = "operator"


OF_A_TENANT = frozenset({Role.PRODUCER, Role.READER})
"""Roles that can be confined to one tenant; the others serve all of them."""

_CONNECT = (
    *("+auth", "+hello", "+ping", "+select", "+reset", "+quit"),
    # Not CLIENT SETINFO, which Redis 7.0 does not know; redis-py goes on without it.
    *("+client|id", "+client|setname", "+client|unblock"),
)
_ENQUEUE = (
    *("+fcall", "+fcall_ro", "+time", "+publish", "+exists", "+del", "+pexpire"),
    *("+hget", "+hmget", "+hset", "+hdel", "+hincrby", "+hstrlen"),
    *("+xread", "+xadd", "+xack", "+xclaim", "+xdel", "+xlen", "+xgroup|create"),
)
_READ = ("+fcall_ro", "+hmget", "+xread")
_SERVE = (
    *("+@read", "+@write", "-@dangerous", "+fcall", "+fcall_ro", "+function|load"),
    *("+info", "+config|get", "+time", "+xinfo", "+xgroup"),
    *("+publish", "+subscribe", "+unsubscribe"),
)
_OPERATE = ("+acl|whoami", "+function|list", "+function|delete", "+client|list", "+memory|usage")


def acl_rules(role: Role, keys: Keys, tenant: str | None = None) -> Rules:
    """Return the rules behind ``ACL SETUSER name on >password``.

    With a tenant, a producer or reader reaches that tenant's requests and no other's. Raises
    ConfigurationError for a role that has to reach all, and InvalidRequest for a bad tenant.
    """
    if tenant is not None and role not in OF_A_TENANT:
        raise ConfigurationError(f"a {role} serves all tenants, so it has none: {tenant!r}")
    of_role: dict[Role, Callable[[], Rules]] = {
        Role.PRODUCER: lambda: _producer(keys, tenant),
        Role.READER: lambda: _reader(keys, tenant),
        Role.WORKER: lambda: _serving(keys, _SERVE),
        Role.OPERATOR: lambda: _serving(keys, (*_SERVE, *_OPERATE)),
    }
    return ("resetkeys", "resetchannels", "-@all", *_CONNECT, *of_role[role]())


def _producer(keys: Keys, tenant: str | None) -> Rules:
    channel, shared = f"&{keys.control}", _books(keys)
    return (channel, f"~{keys.base}", *_own_keys(keys, tenant), *_ENQUEUE, *shared)


def _reader(keys: Keys, tenant: str | None) -> Rules:
    of_tenant = "*" if tenant is None else check_tenant(tenant)
    requests, logs = keys.request(of_tenant, "*"), keys.token_log(of_tenant, "*")
    return (f"~{keys.base}", f"%R~{requests}", f"%R~{logs}", *_READ)


def _serving(keys: Keys, commands: Rules) -> Rules:
    return (f"&{keys.base}:*", f"~{keys.base}", f"~{keys.base}:*", *commands)


def _own_keys(keys: Keys, tenant: str | None) -> Rules:
    """Return the patterns of what belongs to one tenant, or to any."""
    name = "*" if tenant is None else check_tenant(tenant)
    own = (f"{keys.base}:in:?:{name}", keys.request(name, "*"), keys.token_log(name, "*"))
    return tuple(f"~{pattern}" for pattern in own)


def _books(keys: Keys) -> Rules:
    """Return selectors for the keys that all tenants share.

    Each key may be used by the commands that enqueue and cancel need there, and by no others; so
    nobody can delete the counts, or put a key of another type in their place.
    """
    return (
        f"(+hget +hmget +hset +hdel +hincrby ~{keys.stats})",
        f"(+zadd +zrem +zscore +zrange ~{keys.base}:served:?)",
        f"(+zadd +zrem ~{keys.deadlines} ~{keys.promotions})",
        f"(+xadd +del ~{keys.wake})",
    )
