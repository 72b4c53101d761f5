"""What a process keeps for good is left out of Python's search for garbage."""

from __future__ import annotations

import gc


def spare_the_living() -> None:
    """Take every object there is now out of the garbage collector's rounds.

    Modules, a model, a vocabulary: hundreds of thousands of objects that stay until the end, and
    that each full round would visit again. It took a tenth of an engine's time.
    """
    gc.collect()
    gc.freeze()
