"""``headrace acl``: print the user of one role, as a Redis ACL file takes it."""

from __future__ import annotations

import hashlib
import sys
from typing import Annotated

import typer

from headrace.cli import options
from headrace.errors import ConfigurationError
from headrace.keys import Keys, check_tenant
from headrace.rights import Role, acl_rules

PASSWORD_VARIABLE = "HEADRACE_ACL_PASSWORD"

RoleName = Annotated[Role, typer.Argument(help="Whose rights.", show_default=False)]
Tenant = Annotated[
    str | None, options.option("--tenant", "Confine a producer or reader to this tenant.")
]
User = Annotated[
    str | None, options.option("--user", "Name of the user; else <queue>-<role> or -<tenant>.")
]
AclPassword = Annotated[
    str,
    typer.Option(
        envvar=PASSWORD_VARIABLE,
        help="Its password, of which only a hash is printed; better given as the variable.",
        show_default=False,
    ),
]


def acl(
    role: RoleName,
    queue: options.Queue = options.DEFAULT_QUEUE,
    tenant: Tenant = None,
    user: User = None,
    acl_password: AclPassword = "",
) -> None:
    """Print a line for the server's ACL file: a user with the rights of a role, and no more.

    headrace acl producer --queue chat --tenant acme >> users.acl
    """
    if not acl_password:
        raise ConfigurationError(f"{PASSWORD_VARIABLE} is needed: the password of the new user")
    rules = acl_rules(role, Keys(queue), tenant)
    name = user or "-".join([queue, role, *([check_tenant(tenant)] if tenant else [])])
    if any(character.isspace() for character in name):
        raise ConfigurationError(f"--user {name!r} must not hold a space")
    digest = hashlib.sha256(acl_password.encode()).hexdigest()
    sys.stdout.write(f"user {name} on #{digest} {' '.join(rules)}\n")
