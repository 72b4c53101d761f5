"""Building a kernel library: once, whole, whoever else does it, and with a reason when it fails."""

from __future__ import annotations

import ctypes
import multiprocessing
import platform
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from headrace_worker.kernels import build as building
from headrace_worker.kernels.build import Build, BuildFailed
from headrace_worker.kernels.loader import kernel_files
from headrace_worker.kernels.toolchain import build_key, find_compiler


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """A library of one function, which compiles in a fraction of a second."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("g++ is not installed on this machine")
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    return Build((source,), tmp_path / "cache" / "key", compiler, ("-fPIC",), ("-shared",))


def answer(build: Build) -> int:
    """Load the library into this process and ask it."""
    return int(ctypes.CDLL(str(build.library)).answer())


def test_a_library_is_built_once(build: Build) -> None:
    """The first call builds, the next finds it ready, and nothing but the library stays."""
    assert build.ensure()
    assert not build.ensure()
    assert answer(build) == 42
    names = sorted(path.name for path in build.folder.iterdir())
    assert names == ["library.sha256", "library.so", "lock"]


def test_a_ready_library_needs_no_compiler(build: Build) -> None:
    """A cache that was filled elsewhere serves a machine without g++."""
    build.ensure()
    assert not replace(build, compiler=None).ensure()


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "no digest"])
def test_a_damaged_library_is_built_anew(build: Build, damage: str) -> None:
    """A library that is cut short, altered or half removed is not loaded but replaced."""
    build.ensure()
    whole = build.library.read_bytes()
    match damage:
        case "cut":
            build.library.write_bytes(whole[:1000])
        case "changed":
            build.library.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        case "gone":
            build.library.unlink()
        case _:
            build.discard()
    assert not build.is_ready
    assert build.ensure()
    assert answer(build) == 42


def test_what_a_killed_build_left_is_swept(build: Build) -> None:
    """The next build removes the scratch folders of builds that never ended."""
    leftover = build.folder / "build-killed"
    leftover.mkdir(parents=True)
    (leftover / "answer.o").touch()
    build.ensure()
    assert not leftover.exists()


def test_workers_that_start_together_build_once(build: Build) -> None:
    """Of four processes at the same moment one builds, and the others wait for it."""
    with multiprocessing.get_context("fork").Pool(4) as pool:
        built = pool.map(Build.ensure, [build] * 4)
    assert sorted(built) == [False, False, False, True]
    assert answer(build) == 42


def test_without_a_compiler_the_reason_says_what_to_install(build: Build) -> None:
    """A machine without g++ is told so."""
    with pytest.raises(BuildFailed, match="install g\\+\\+"):
        replace(build, compiler=None).ensure()


def test_a_compilers_complaint_is_passed_on(build: Build) -> None:
    """The reason holds what the compiler said, and the scratch folder is gone."""
    build.sources[0].write_text("int answer( {\n")
    with pytest.raises(BuildFailed, match="error: expected"):
        build.ensure()
    assert [path.name for path in build.folder.iterdir()] == ["lock"]


def test_a_folder_that_cannot_be_written_is_a_reason(build: Build) -> None:
    """A cache folder that is a file, full or read-only is named, and no other error escapes."""
    build.folder.parent.write_text("not a folder")
    with pytest.raises(BuildFailed, match=r"cannot build in .*key"):
        build.ensure()


def test_a_compiler_that_hangs_is_given_up(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that does not end is killed, and said to be the reason."""
    monkeypatch.setattr(building, "_TIMEOUT_S", 0.01)
    with pytest.raises(BuildFailed, match="did not end"):
        build.ensure()


def test_the_key_follows_sources_and_flags(tmp_path: Path) -> None:
    """Another source, file name or flag is another build; the order of files is not."""
    first, second = tmp_path / "a.cpp", tmp_path / "b.h"
    first.write_text("1")
    second.write_text("2")
    key = build_key([first, second], ["-O3"])
    assert build_key([second, first], ["-O3"]) == key
    assert build_key([first, second], ["-O2"]) != key
    assert build_key([first], ["-O3"]) != key
    second.write_text("3")
    assert build_key([first, second], ["-O3"]) != key


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AMX is Intel's")
@pytest.mark.parametrize(("capability", "is_used"), [("AVX512", True), ("AVX2", False)])
def test_the_matrix_unit_goes_with_torchs_widest_vectors(
    build: Build, capability: str, is_used: bool
) -> None:
    """A torch that is held to narrower ones still gets kernels, without the unit."""
    unit = ("-mamx-tile", "-mamx-bf16", "-mamx-int8", "-mavx512bf16")
    header = next(file for file in kernel_files() if file.name == "matrix_registers.h")
    command = (build.compiler, *unit, f"-DCPU_CAPABILITY_{capability}", "-E", "-dM", "-xc++")
    macros = subprocess.run([*command, str(header)], check=True, capture_output=True, text=True)
    assert ("#define HEADRACE_AMX 1" in macros.stdout) is is_used


def test_cxx_names_the_compiler() -> None:
    """``CXX`` goes first; a name that does not exist is passed over."""
    assert Path(find_compiler({"CXX": "sh"}) or "").name == "sh"
    assert find_compiler({"CXX": "no-such-compiler"}) == find_compiler({})
