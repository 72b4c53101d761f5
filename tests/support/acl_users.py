"""Users with the rights of a role, made on a running server and gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis

from headrace.functions import load_library_sync
from headrace.keys import Keys
from headrace.rights import Role, acl_rules
from support.servers import Server

PASSWORD = "acl-secret-4711"


class AclUsers:
    """Makes users of one queue; ``add`` returns the URL to connect with."""

    def __init__(self, client: redis.Redis, server: Server, keys: Keys) -> None:
        self._client = client
        self._server = server
        self._keys = keys
        self.names: list[str] = []

    def add(self, role: Role, tenant: str | None = None) -> str:
        """Make a user, or return the one that there is."""
        name = f"{self._keys.queue}-{role}-{tenant or 'all'}"
        rules = acl_rules(role, self._keys, tenant)
        execute: Any = self._client.execute_command
        execute("ACL", "SETUSER", name, "reset", "on", f">{PASSWORD}", *rules)
        self.names.append(name)
        return self._server.url.replace("unix://", f"unix://{name}:{PASSWORD}@")


@contextmanager
def acl_users(client: redis.Redis, server: Server, keys: Keys) -> Iterator[AclUsers]:
    """Give a maker of users on a server that has the queue's functions."""
    load_library_sync(client)
    users = AclUsers(client, server, keys)
    yield users
    if users.names:
        client.acl_deluser(*users.names)
