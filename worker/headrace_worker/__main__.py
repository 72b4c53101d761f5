"""``python -m headrace_worker``: the worker's process, and what its exit status means.

0  told to stop, or the queue is empty and that was asked for
1  the engine cannot load, the server is unsafe, or a fault of ours
2  the settings are wrong
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from headrace_worker.options import SettingsError, parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker with the settings of a command line; return the exit status."""
    try:
        settings = parse(argv)
    except SettingsError as error:
        for problem in error.problems:
            sys.stderr.write(f"headrace worker: {problem}\n")
        return 2
    from headrace_worker.app import run_worker  # the settings answer faster without it

    return run_worker(settings)


def leave(status: int) -> NoReturn:
    """End the process at once.

    All is handed over and closed by then, and to take an interpreter apart that has loaded this
    much lasts half a second, or several on a busy machine: whoever waits for the end waits for it.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
