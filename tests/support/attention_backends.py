"""Every attention backend that can be put to the test on a CPU, real device or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headrace_worker.attention import AttentionBackend, available_backends, create_backend
from support.attention_cases import CPU
from support.flash_stand_ins import Flash3OnCpu

Factory = Callable[[], AttentionBackend]

BACKENDS: dict[str, Factory] = {
    **{name: partial(create_backend, name, CPU) for name in available_backends(CPU)},
    "flash 3 (stand-in)": Flash3OnCpu,
}
