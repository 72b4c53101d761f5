"""The kernels of this process: found or built, loaded into torch, checked, or a reason why not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter

import torch

from headrace.folders import cache_folder
from headrace_worker.kernels.build import Build, BuildFailed
from headrace_worker.kernels.checks import KernelMismatch, check_kernels
from headrace_worker.kernels.toolchain import build_key, compile_flags, find_compiler, link_flags

SWITCH = "HEADRACE_KERNELS"  # "off": the torch path runs; the kernels belong to the whole process
_SOURCES = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class KernelStatus:
    """How loading went; once per process, as torch cannot unload operators."""

    missing_reason: str | None  # why ``torch.ops.headrace`` is not to be used; None: it may be
    build_s: float | None  # seconds that building took; None: a ready library was found

    @property
    def is_loaded(self) -> bool:
        """True when the operators of ``torch.ops.headrace`` may be called."""
        return self.missing_reason is None


@cache
def load_kernels() -> KernelStatus:
    """Load the kernels, building them where that has not been done; never raises.

    The first call on a machine takes as long as a compiler does, half a minute or so. A library
    that cannot be loaded is built anew, once. One that computes something else than torch does is
    left alone.
    """
    if is_switched_off():
        return KernelStatus(f"{SWITCH} is off", None)
    build = kernel_build()
    started_s = perf_counter()
    try:
        was_built = _load(build)
        build_s = perf_counter() - started_s if was_built else None
        check_kernels()
    except (BuildFailed, KernelMismatch) as error:
        return KernelStatus(str(error), None)
    return KernelStatus(None, build_s)


def kernels_are_loaded() -> bool:
    """Return whether the operators of ``torch.ops.headrace`` may be called, loading them if so."""
    return load_kernels().is_loaded


def is_switched_off(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment says so."""
    return environ.get(SWITCH, "").lower() in ("off", "0", "false", "no")


def kernel_build() -> Build:
    """Return the build of our own sources for this machine; nothing is built yet."""
    flags = compile_flags()
    key = build_key(kernel_files(), flags)
    return Build(
        sources=tuple(file for file in kernel_files() if file.suffix == ".cpp"),
        folder=cache_folder() / "kernels" / key,
        compiler=find_compiler(),
        compile_flags=flags,
        link_flags=link_flags(),
    )


def kernel_files() -> tuple[Path, ...]:
    """Return the C++ files that are shipped, headers included."""
    return tuple(sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")]))


def _load(build: Build) -> bool:
    """Load the library; return True if it was built for this. Raises BuildFailed."""
    was_built = build.ensure()
    try:
        torch.ops.load_library(build.library)  # type: ignore[no-untyped-call]
    except OSError as error:
        if was_built:
            raise BuildFailed(f"the library does not load: {error}") from error
        build.discard()
        return _load(build)
    return was_built
