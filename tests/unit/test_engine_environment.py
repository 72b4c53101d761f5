"""The engine process starts with large allocations on huge pages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace_worker.engine.environment import engine_environment


def test_huge_pages_are_asked_for() -> None:
    """Nothing else of the environment changes."""
    assert engine_environment({"HOME": "/root"}) == {
        "HOME": "/root",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }


def test_other_tunables_stay() -> None:
    """What a user has set there goes on to hold."""
    environ = engine_environment({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"})
    assert environ["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"


def test_a_user_can_say_no() -> None:
    """A value that is there is not replaced."""
    refused = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert engine_environment(refused) == refused


@pytest.mark.parametrize("is_wanted", [False, True])
def test_the_c_library_heeds_it(is_wanted: bool) -> None:
    """A large allocation of a process with this environment is marked for huge pages (Linux)."""
    code = (
        "import torch\n"
        "kept = torch.ones(64 * 2**20, dtype=torch.uint8)\n"
        "place = kept.data_ptr()\n"
        "lines = open('/proc/self/smaps').read().splitlines()\n"
        "inside = False\n"
        "for line in lines:\n"
        "    first = line.split()[0]\n"
        "    if '-' in first and ':' not in first:\n"
        "        start, end = (int(x, 16) for x in first.split('-'))\n"
        "        inside = start <= place < end\n"
        "    if inside and line.startswith('VmFlags:'):\n"
        "        print('hg' in line.split())\n"
    )
    environ = engine_environment({**os.environ, "GLIBC_TUNABLES": ""})
    if not is_wanted:
        del environ["GLIBC_TUNABLES"]
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(is_wanted)]
