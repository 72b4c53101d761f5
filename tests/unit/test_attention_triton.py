"""The Triton backend: company changes no bit, work is listed once, and kernels compile for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_worker.attention import AttentionNeed, KVCacheSpec, PackedBatch, UnusableBackend
from headrace_worker.attention import triton as backend_module
from headrace_worker.attention.triton import TritonBackend, _plan_work
from support.attention_cases import CPU, Case, draw, only, solve
from support.packed import Share, pack
from support.repository import ROOT

pytest.importorskip("triton", reason="Triton is not installed on this machine")
from headrace_worker.kernels_triton.shape import MAX_PARTS, PART_KEYS, AttentionShape

LLAMA = AttentionShape(4, 2, 128, 16, None, is_capped=False, dtype=torch.bfloat16)
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}  # of one block


@pytest.mark.parametrize(
    ("window", "soft_cap", "dtype"),
    [(None, None, torch.float32), (24, None, torch.bfloat16), (300, 5.0, torch.float32)],
)
def test_neighbours_change_no_bit(
    window: int | None, soft_cap: float | None, dtype: torch.dtype
) -> None:
    """A decode or chunk gets the same bits alone as beside long decodes and long chunks."""
    shares = ((20, 1), (600, 1), (0, 1), (5, 7), (300, 33))
    problem = draw(Case(shares, heads=2, window=window, soft_cap=soft_cap, dtype=dtype))
    together = torch.split(solve(TritonBackend(), problem), [new for _, new in shares])
    for seq, expected in enumerate(together):
        alone = solve(TritonBackend(), only(problem, seq))
        assert torch.equal(alone, expected), f"sequence {shares[seq]} depends on its neighbours"


@pytest.mark.parametrize(
    ("length", "window"),
    [(255, None), (256, None), (257, None), (600, 300), (1500, 700), (8192, None), (8193, None)],
)
def test_a_decode_in_partitions_is_exact(length: int, window: int | None) -> None:
    """One partition, several, the most there are, and a last one that is nearly empty."""
    case = Case(((length - 1, 1),), heads=3, kv_heads=1, head_dim=8, block_size=64, window=window)
    problem = draw(case)
    output = solve(TritonBackend(), problem)
    torch.testing.assert_close(output.double(), problem.answer(), atol=2e-6, rtol=2e-6)


@settings(max_examples=8, deadline=None)
@given(
    shares=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 30)), min_size=1, max_size=3).map(
        lambda shares: tuple(sorted(shares, key=lambda share: share[1] != 1))
    ),
    block_size=st.sampled_from([1, 4, 16, 32]),
    window=st.none() | st.integers(1, 50),
    seed=st.integers(0, 2**31),
)
def test_any_batch(
    shares: tuple[tuple[int, int], ...], block_size: int, window: int | None, seed: int
) -> None:
    """Whatever the lengths, the block size and the window, the result is exact."""
    problem = draw(Case(shares, 2, 1, head_dim=8, block_size=block_size, window=window, seed=seed))
    output = solve(TritonBackend(), problem)
    torch.testing.assert_close(output.double(), problem.answer(), atol=2e-6, rtol=2e-6)


@given(
    st.lists(
        st.tuples(st.integers(0, 20_000), st.sampled_from([1, 1, 2, 15, 16, 17, 400])), min_size=1
    )
)
def test_every_tile_and_partition_is_listed_once(shares: list[tuple[int, int]]) -> None:
    """A chunk has a tile for each 16 new tokens, a decode a partition for each 256 keys, to 32."""
    work = _plan_work(_batch_of(shares), LLAMA)
    pairs = zip(work.item_seqs.tolist(), work.item_parts.tolist(), strict=True)
    listed = [(seq, part) for seq, part in pairs if seq < len(shares)]
    assert LLAMA.tile_tokens == 16
    expected = []
    for seq, (cached, new) in enumerate(shares):
        parts = min(MAX_PARTS, -(-(cached + 1) // PART_KEYS)) if new == 1 else -(-new // 16)
        expected += [(seq, part) for part in range(parts)]
        assert new > 1 or parts <= work.num_parts
    assert listed == expected


def test_the_work_is_listed_without_waiting_for_the_device() -> None:
    """On a device that has no numbers to give, the list has the same size."""
    batch = _batch_of([(600, 1), (5, 40)])
    tensors = {
        name: getattr(batch, name).to("meta") for name in ("cu_seqlens_q", "seq_lens", "input_ids")
    }
    blind = _plan_work(replace(batch, **tensors), LLAMA)
    assert blind.item_seqs.shape == _plan_work(batch, LLAMA).item_seqs.shape


def test_a_graph_s_room_for_long_sequences_costs_short_ones_nothing() -> None:
    """Its list holds what there might be; the device says how much of it there is to do."""
    batch = replace(_batch_of([(20, 1), (600, 1), (0, 1)]), max_seqlen_k=40_000)
    work = _plan_work(batch, LLAMA)
    assert work.item_seqs.tolist() == [0, 1, 1, 1, 2, *[3] * (3 * MAX_PARTS - 5)]
    assert work.num_items.tolist() == [5]


@pytest.mark.parametrize("shares", [((20, 1), (600, 1), (0, 1)), ((600, 1), (5, 7), (300, 70))])
def test_few_programs_do_the_work_of_many(
    shares: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take items in turns, and who takes one changes no bit."""
    problem = draw(Case(shares, heads=2))
    expected = solve(TritonBackend(), problem)
    monkeypatch.setattr(backend_module, "_MOST_PROGRAMS", 4)
    assert torch.equal(solve(TritonBackend(), problem), expected)


def test_decodes_alone_get_no_room_for_chunks() -> None:
    """A batch of short decodes is one work item each."""
    work = _plan_work(_batch_of([(20, 1), (255, 1), (0, 1)]), LLAMA)
    assert work.item_seqs.tolist() == [0, 1, 2]
    assert work.num_parts == 1


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        (AttentionNeed(torch.device("cuda:0"), torch.bfloat16, 128), None),
        (AttentionNeed(torch.device("cuda:0"), torch.float32, 80), None),
        (AttentionNeed(torch.device("cuda:0"), torch.float64), "dtype float64 is not supported"),
        (AttentionNeed(torch.device("cuda:0"), None, 320), "head_dim 320 is more than 256"),
        (AttentionNeed(CPU), "it runs on CUDA, not on 'cpu'"),
    ],
)
@pytest.mark.parametrize("capability", [(8, 0), (12, 0), (7, 5)])
def test_what_is_in_its_way_is_named(
    need: AttentionNeed, reason: str | None, capability: tuple[int, int], monkeypatch: Any
) -> None:
    """A device too old, a CPU without the interpreter, a dtype or head size it does not have."""
    monkeypatch.setattr(backend_module, "_is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if capability < (8, 0) and need.device.type == "cuda":
        reason = "it needs compute capability 8.0, and cuda:0 has 7.5"
    found = TritonBackend.obstacle(need)
    assert found == (None if reason is None else f"Triton: {reason}")


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is imported to find out."""
    monkeypatch.setattr(backend_module, "find_spec", lambda name: None)
    assert TritonBackend.obstacle(AttentionNeed(CPU)) == "Triton is not installed"


def test_a_cache_it_cannot_use_is_refused() -> None:
    """Allocating names the head size."""
    spec = KVCacheSpec(1, 1, 320, torch.float32, CPU, 16)
    with pytest.raises(UnusableBackend, match="head_dim 320 is more than 256"):
        TritonBackend().allocate(spec, 4)


@pytest.mark.parametrize(
    ("capability", "names"),
    [(80, ("llama", "gemma")), (90, ("llama", "rows")), (120, ("smollm",))],
)
def test_the_kernels_compile_for_gpus(capability: int, names: tuple[str, ...]) -> None:
    """Ampere, Hopper and Blackwell: they assemble, and fit the smallest GPU of each generation."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests")]),
    }
    run = subprocess.run(
        [sys.executable, "-m", "support.triton_compile", str(capability), *names],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    shared = json.loads(run.stdout)
    assert set(shared) == set(names)
    assert max(shared.values()) <= min(SHARED_BYTES[86], SHARED_BYTES[capability])


def _batch_of(shares: list[tuple[int, int]]) -> PackedBatch:
    """Return a step over sequences of (cached, new) tokens, without blocks worth the name."""
    return pack([Share([0] * new, cached, [0]) for cached, new in shares], 10**6)
