"""Every attention backend that can be put to the test on a CPU, real device or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from headrace_worker.attention import AttentionBackend, available_backends, create_backend
from headrace_worker.attention.triton import TritonBackend
from support.attention_cases import CPU
from support.flash_stand_ins import Flash3OnCpu

Factory = Callable[[], AttentionBackend]

# Quick enough to be asked at random.
QUICK: dict[str, Factory] = {
    **{name: partial(create_backend, name, CPU) for name in available_backends(CPU)},
    "flash 3 (stand-in)": Flash3OnCpu,
}

# Triton has no wheels but for Linux.
BACKENDS: dict[str, Factory] = dict(QUICK)
if find_spec("triton") is not None:
    BACKENDS["triton (interpreter)"] = TritonBackend
