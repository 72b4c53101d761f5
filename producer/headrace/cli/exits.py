"""Exit codes, and which error means which."""

from __future__ import annotations

from enum import IntEnum

from headrace.errors import ConfigurationError, HeadraceError, TransportError


class ExitCode(IntEnum):
    """What a command's end means to the shell."""

    OK = 0
    FAILED = 1  # the answer is "no", or a check found something wrong
    USAGE = 2  # wrong arguments or settings, nothing was done
    UNREACHABLE = 3  # Redis cannot be reached, or refuses
    INTERRUPTED = 130  # Ctrl-C; 128 + its number for any other signal


EXIT_CODES_HELP = (
    "Exit codes: 0 all is well, 1 a request or a check failed, 2 wrong usage, "
    "3 Redis is unreachable, 130 interrupted."
)


class CommandError(HeadraceError):
    """A command cannot go on; the message is all that a person needs."""


def exit_code_of(error: HeadraceError) -> ExitCode:
    """Return the code for an error that ends a command."""
    if isinstance(error, TransportError):
        return ExitCode.UNREACHABLE
    if isinstance(error, ConfigurationError):
        return ExitCode.USAGE
    return ExitCode.FAILED
