"""A few small sums after loading: kernels that compute what torch does not are not used."""

from __future__ import annotations

import torch

from headrace_worker.kernels.attention_checks import find_attention_differences
from headrace_worker.kernels.linear_checks import find_linear_differences
from headrace_worker.kernels.row_checks import find_differences


class KernelMismatch(Exception):
    """A kernel's result differs from torch's; the message names the kernel."""


def check_kernels() -> None:
    """Run each kind of kernel once against torch; raises KernelMismatch."""
    _check_threads()
    found = (*find_differences(), *find_attention_differences(), *find_linear_differences())
    if differences := ", ".join(found):
        raise KernelMismatch(f"kernels compute what torch does not: {differences}")


def _check_threads() -> None:
    """Kernels that ran on another pool than torch's would fight with it for the cores."""
    expected, found = torch.get_num_threads(), torch.ops.headrace.count_threads()
    if found != expected:
        raise KernelMismatch(f"kernels run on {found} threads where torch has {expected}")
