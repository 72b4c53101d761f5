"""``python -m tests.equivalence.report`` from the repository's root prints the whole matrix."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Put the folder of the tests on the path, as pytest does, and run."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.matrix_report import main as print_matrix

    return print_matrix()


if __name__ == "__main__":
    sys.exit(main())
