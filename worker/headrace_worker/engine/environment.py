"""What the engine process finds in its environment, so that a user need set nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping

_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb"


def engine_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environ`` with large allocations on huge pages, unless it says otherwise.

    A step reads every weight once. With pages of 4 KiB a processor, a virtual one above all, spends
    more time on finding them than on reading. glibc 2.35 and later asks for pages of 2 MiB then;
    older ones and other C libraries do not heed the variable.
    """
    tunables = environ.get(_TUNABLES, "")
    if _HUGE_PAGES in tunables:
        return dict(environ)
    return {**environ, _TUNABLES: ":".join(filter(None, (tunables, f"{_HUGE_PAGES}=1")))}
