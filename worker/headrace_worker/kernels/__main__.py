"""Build the kernels ahead of the first worker: ``python -m headrace_worker.kernels``."""

from __future__ import annotations

import sys

from headrace_worker.kernels.loader import KernelStatus, load_kernels


def main() -> int:
    """Build, load and check the kernels; print how it went; 0 also where the torch path runs."""
    sys.stdout.write(f"kernels: {describe(load_kernels())}\n")
    return 0


def describe(status: KernelStatus) -> str:
    """Say in a few words how loading went."""
    if status.missing_reason is not None:
        return f"not used: {status.missing_reason}"
    return "ready" if status.build_s is None else f"built in {status.build_s:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
