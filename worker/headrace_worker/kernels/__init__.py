"""C++ kernels for CPUs: built on first use, cached, checked; without them the torch path runs."""

from headrace_worker.kernels.loader import KernelStatus, kernels_are_loaded, load_kernels

__all__ = ["KernelStatus", "kernels_are_loaded", "load_kernels"]
