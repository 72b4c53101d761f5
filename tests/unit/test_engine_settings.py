"""Contradictory settings and memory that does not suffice are found before the first request."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_worker.engine import memory
from headrace_worker.engine.errors import SettingsError
from headrace_worker.engine.memory import (
    CPU_LIMIT_BYTES,
    default_cpu_kv_bytes,
    estimate_activation_bytes,
    plan_kv_cache,
)
from headrace_worker.engine.settings import EngineSettings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, not 0"),
        ({"max_num_batched_tokens": -5}, "not -5"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1, not 0"),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, "64 is less than max_num_seqs 65"),
        ({"gpu_memory_utilization": 0.0}, "in \\(0, 1\\], not 0.0"),
        ({"gpu_memory_utilization": float("nan")}, "not nan"),
    ],
)
def test_contradictory_settings_name_the_value(settings: dict[str, float], message: str) -> None:
    """The error says which setting, and what it was."""
    with pytest.raises(SettingsError, match=message):
        EngineSettings(model="m", **settings)  # type: ignore[arg-type]


def plan(kv_cache_bytes: int) -> int:
    """Return the number of blocks for Llama-3-8B in bf16, k = 131,072 bytes a token."""
    return plan_kv_cache(
        kv_cache_bytes=kv_cache_bytes,
        weights_bytes=16 * 2**30,
        activation_bytes=2**30,
        kv_bytes_per_token=131_072,
        block_size=16,
    ).num_blocks


def test_the_blocks_are_what_the_equation_says() -> None:
    """One GiB holds 512 blocks of 16 tokens, of which one is the trash block."""
    assert plan(2**30) == 511


def test_a_budget_without_room_for_a_block_names_the_numbers() -> None:
    """One usable block and the trash block are the least."""
    assert plan(2 * 16 * 131_072) == 1
    with pytest.raises(SettingsError, match="weights 17179869184 - activations 1073741824"):
        plan(2 * 16 * 131_072 - 1)
    with pytest.raises(SettingsError, match="no KV block fits"):
        plan(-5 * 2**30)


def test_the_budget_adds_up() -> None:
    """M is weights, activations and KV cache together, so the log line can be checked by hand."""
    found = plan_kv_cache(
        kv_cache_bytes=1000,
        weights_bytes=200,
        activation_bytes=30,
        kv_bytes_per_token=2,
        block_size=4,
    )
    assert (found.memory_budget_bytes, found.num_blocks) == (1230, 124)


def test_the_default_on_a_cpu_is_modest() -> None:
    """It never takes more than its limit, and something is there to take."""
    assert 0 < default_cpu_kv_bytes() <= CPU_LIMIT_BYTES


def test_memory_that_caches_files_counts_as_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Loading a model fills the page cache; that leaves no less for the KV cache."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8000000 kB\nMemFree: 9000 kB\nMemAvailable:  800000 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    assert default_cpu_kv_bytes() == 200_000 * 1024


@pytest.mark.parametrize(("limit", "expected"), [("500000000", 100_000_000), ("max", None)])
def test_a_containers_limit_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, expected: int | None
) -> None:
    """What the container may still use bounds the cache, whatever the machine has."""
    (tmp_path / "limit").write_text(f"{limit}\n")
    (tmp_path / "use").write_text("150000000\n")
    (tmp_path / "stat").write_text("anon 100000000\ninactive_file 50000000\n")
    unlimited = default_cpu_kv_bytes()
    monkeypatch.setattr(memory, "_CONTAINER_LIMIT", tmp_path / "limit")
    monkeypatch.setattr(memory, "_CONTAINER_USE", tmp_path / "use")
    monkeypatch.setattr(memory, "_CONTAINER_STAT", tmp_path / "stat")
    if expected is None:
        assert default_cpu_kv_bytes() == pytest.approx(unlimited, rel=0.2)
    else:
        assert default_cpu_kv_bytes() == expected


def test_without_meminfo_the_system_is_asked_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not every system has /proc."""
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "none")
    assert 0 < default_cpu_kv_bytes() <= CPU_LIMIT_BYTES


def test_activations_grow_with_the_budget_and_the_vocabulary() -> None:
    """Both the hidden states of a step and its logits count."""
    base = {"num_rows": 8, "hidden_size": 64, "intermediate_size": 100, "itemsize": 2}
    small = estimate_activation_bytes(num_tokens=64, vocab_size=1000, **base)
    assert small == 64 * (8 * 64 + 3 * 100) * 2 + 5 * 8 * 1000 * 4
    assert estimate_activation_bytes(num_tokens=128, vocab_size=1000, **base) > small
