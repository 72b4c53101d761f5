"""Where the console script begins: without the extra it says so, and errors become one line."""

from __future__ import annotations

import importlib.util
import sys

NEEDED_MODULES = ("typer", "rich")


def main() -> None:
    """Run the ``headrace`` command and exit with its code."""
    missing = [name for name in NEEDED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"headrace: the command is not installed ({', '.join(missing)} missing): "
            "pip install 'headrace[cli]'\n"
        )
        sys.exit(2)
    from headrace.cli.app import run_app

    sys.exit(run_app())


if __name__ == "__main__":
    main()
