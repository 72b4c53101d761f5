"""How the kernels are compiled on this machine: the compiler, its flags, what makes a build stale.

Plain compiler calls, not torch's extension loader: that one costs a slow import at every start,
needs ninja and setuptools, and waits for ever after a build that was killed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch


def find_compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of ``$CXX``, g++ or c++, whichever is there first; ``None`` without any."""
    names = (environ.get("CXX"), "g++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def compile_flags() -> tuple[str, ...]:
    """Return the flags for this CPU; none lets the compiler reorder or fuse float arithmetic.

    ``-fopenmp`` is for compiling only: the library is linked without an OpenMP runtime and finds
    the symbols of torch's, so that both share one pool of threads.
    """
    root = Path(torch.__file__).parent / "include"
    capability = torch.backends.cpu.get_cpu_capability()
    vectors = capability if capability in ("AVX2", "AVX512") else "DEFAULT"
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    return (
        *("-std=c++20", "-O3", "-DNDEBUG", native, "-ffp-contract=off", "-fno-math-errno"),
        *("-fPIC", "-fopenmp", "-fvisibility=hidden"),
        *(f"-DCPU_CAPABILITY={vectors}", f"-DCPU_CAPABILITY_{vectors}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *("-isystem", str(root), "-isystem", str(root / "torch/csrc/api/include")),
    )


def link_flags() -> tuple[str, ...]:
    """Return the flags that link against the torch that is running."""
    return ("-shared", f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10")


def build_key(files: Iterable[Path], flags: Iterable[str]) -> str:
    """Return what names a build: equal keys mean that a ready library will do.

    It covers sources, flags, torch and the CPU, since a cache may lie on a shared disk. It does not
    cover the compiler: whoever has a ready library needs none.
    """
    digest = hashlib.sha256()
    for part in (torch.__version__, _cpu_features(), *flags):
        digest.update(part.encode() + b"\0")
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
