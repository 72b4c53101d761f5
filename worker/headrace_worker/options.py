"""From command line and environment to settings, with everything that is wrong said at once."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo

from headrace.errors import ConfigurationError
from headrace_worker.logs import without_password
from headrace_worker.settings import PREFIX, WorkerSettings

# Variables under our prefix that somebody else reads: headrace.folders, the kernels' loader in the
# engine's process, compose.yaml. Those of the headrace command's own flags do not come this far: it
# takes them out.
OTHER_VARIABLES = (
    *("CACHE_DIR", "STATE_DIR", "KERNELS"),
    *("QUEUE_MEMORY", "ACL_FILE", "QUEUE_URL", "BACKEND_URL"),  # of compose.yaml
)
_HIDDEN = frozenset({"engine_command"})


class SettingsError(ConfigurationError):
    """The worker cannot start with these settings; ``problems`` has one line for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def parse(argv: Sequence[str] | None = None) -> WorkerSettings:
    """Return the settings of a command line; a flag wins over its environment variable.

    Raises SettingsError; an unknown flag and ``--help`` end the process, as is usual.
    """
    parser = argparse.ArgumentParser(
        "headrace worker",
        description="Claim requests from a queue and answer them.",
        allow_abbrev=False,  # the headrace command looks for whole flags
    )
    add_arguments(parser)
    return load_settings(vars(parser.parse_args(argv)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each setting; flags that are not given leave no trace in the namespace."""
    for name, field in WorkerSettings.model_fields.items():
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(name, field)}
        if field.annotation is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = "VALUE"
        parser.add_argument(flag(name), **options)


def load_settings(given: Mapping[str, object]) -> WorkerSettings:
    """Return the settings from given values and the environment; raises SettingsError."""
    problems = list(_unknown_variables(os.environ))
    try:
        settings = WorkerSettings(**given)  # type: ignore[arg-type]  # pydantic checks them
    except ValidationError as error:
        problems += [_describe(item, given) for item in error.errors(include_url=False)]
        raise SettingsError(problems) from None  # the cause would show the values, passwords too
    if problems:
        raise SettingsError(problems)
    return settings


def flag(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """Return the environment variable of a field."""
    return PREFIX + name.upper()


def _help(name: str, field: FieldInfo) -> str:
    if name in _HIDDEN:
        return argparse.SUPPRESS
    text = (field.description or "").replace("%", "%%")
    if field.is_required() or field.default in (None, "") or field.default_factory is not None:
        return text
    return f"{text} ({str(field.default).replace('%', '%%')})"


def _unknown_variables(environ: Mapping[str, str]) -> Iterable[str]:
    known = [*map(variable, WorkerSettings.model_fields), *(PREFIX + n for n in OTHER_VARIABLES)]
    for name in sorted(environ):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            nearest = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.0)
            yield f"{name}: no such setting; the nearest is {nearest[0]}"


def _describe(item: Any, given: Mapping[str, object]) -> str:
    """Say what is wrong, with the value and where it came from."""
    reason = item["msg"].removeprefix("Value error, ")
    if not item["loc"]:
        return str(reason)
    name = str(item["loc"][0])
    if item["type"] == "missing":
        return f"{flag(name)} or {variable(name)} is needed"
    if name in given:
        return f"{flag(name)} {_shown(name, given[name])}: {reason}"
    return f"{variable(name)}={_shown(name, os.environ.get(variable(name), ''))}: {reason}"


def _shown(name: str, value: object) -> str:
    is_secret = WorkerSettings.model_fields[name].annotation is SecretStr
    # Without a scheme nobody can say which part of it is the password.
    return "***" if is_secret and "://" not in str(value) else without_password(str(value))
