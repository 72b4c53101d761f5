"""Loading the kernels: into torch, on its own threads, or with a reason why the torch path runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace_worker.kernels import checks, load_kernels, loader
from headrace_worker.kernels.build import BuildFailed
from headrace_worker.kernels.checks import KernelMismatch
from headrace_worker.kernels.toolchain import find_compiler

needs_compiler = pytest.mark.skipif(
    find_compiler() is None, reason="g++ is not installed on this machine"
)


@pytest.fixture
def fresh_load() -> Iterator[None]:
    """Let ``load_kernels`` do its work again, and forget it afterwards."""
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


@needs_compiler
def test_where_a_compiler_is_the_kernels_are() -> None:
    """With g++ the kernels build, load and pass their checks."""
    assert load_kernels().missing_reason is None
    assert load_kernels() is load_kernels()


@needs_compiler
def test_kernels_share_torchs_threads(two_threads: None) -> None:
    """A kernel's loop runs on as many threads as torch has."""
    assert load_kernels().is_loaded
    assert torch.ops.headrace.count_threads() == 2


@needs_compiler
def test_a_ready_library_starts_fast() -> None:
    """A ready library brings neither torch's slow extension builder nor an OpenMP of its own."""
    load_kernels()
    code = (
        "import sys; from headrace_worker.kernels import load_kernels; status = load_kernels();"
        "assert status.is_loaded and status.build_s is None;"
        "assert 'torch.utils.cpp_extension' not in sys.modules;"
        "mapped = open('/proc/self/maps').read().splitlines();"
        "assert len({line.split()[-1] for line in mapped if 'libgomp' in line}) == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("error", [BuildFailed("no g++"), KernelMismatch("wrong sums")])
def test_what_goes_wrong_becomes_the_reason(
    fresh_load: None, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """No compiler, or a kernel that computes something else: the torch path, and why."""

    def fail(*_: object) -> None:
        raise error

    where = "_load" if isinstance(error, BuildFailed) else "check_kernels"
    monkeypatch.setattr(loader, "_load", lambda build: False)
    monkeypatch.setattr(loader, where, fail)
    status = load_kernels()
    assert not status.is_loaded
    assert status.missing_reason == str(error)


@pytest.mark.parametrize("word", ["off", "OFF", "0", "false", "no"])
def test_the_environment_switches_them_off(
    fresh_load: None, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """``HEADRACE_KERNELS=off`` leaves the torch path, and nothing is built."""
    monkeypatch.setenv("HEADRACE_KERNELS", word)
    monkeypatch.setattr(loader, "kernel_build", lambda: pytest.fail("looked for a build"))
    assert load_kernels().missing_reason == "HEADRACE_KERNELS is off"


def test_a_library_that_does_not_load_is_built_once_more(tmp_path: Path) -> None:
    """A whole file that is no library is discarded; if a new one is none either, that is told."""
    build = replace(loader.kernel_build(), folder=tmp_path, compiler="true", link_flags=())
    with pytest.raises(BuildFailed):
        loader._load(build)
    fake_compiler = tmp_path / "c++"
    fake_compiler.write_text(
        '#!/bin/sh\nfor last; do :; done\necho x >> "$0.log"; echo no > "$last"\n'
    )
    fake_compiler.chmod(0o755)
    build = replace(build, folder=tmp_path / "key", compiler=str(fake_compiler))
    build.ensure()
    with pytest.raises(BuildFailed, match="does not load"):
        loader._load(build)
    num_calls = len((tmp_path / "c++.log").read_text().split())
    assert num_calls == 2 * (len(build.sources) + 1)


@needs_compiler
def test_attention_that_errs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that is off by a little in one type does not pass, and is named."""
    right = torch.ops.headrace.paged_attention

    def wrong(query: torch.Tensor, *rest: object) -> torch.Tensor:
        error = 0.1 if query.dtype == torch.bfloat16 else 0.0
        output: torch.Tensor = right(query, *rest) + error
        return output

    monkeypatch.setattr(torch.ops.headrace, "paged_attention", wrong)
    with pytest.raises(KernelMismatch, match=r"attention of 1 in torch.bfloat16, attention of 11"):
        checks.check_kernels()


@needs_compiler
def test_kernels_on_other_threads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels whose loops run on another pool than torch's do not pass."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.raises(KernelMismatch, match="where torch has 77"):
        checks.check_kernels()


def test_sources_and_headers_count() -> None:
    """Every C++ file of the package is part of the key."""
    names = {file.name for file in loader.kernel_files()}
    assert {"threads.cpp", "attention.cpp", "kv_layout.h"} <= names
