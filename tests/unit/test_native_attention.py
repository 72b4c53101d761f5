"""The native backend: a row's bits follow from its own keys alone, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace_worker.attention import AttentionNeed, native
from headrace_worker.attention.native import NativeBackend
from headrace_worker.kernels import KernelStatus, load_kernels
from support.attention_cases import CPU, Case, allocate, draw, only, solve, write

pytestmark = [
    pytest.mark.skipif(not load_kernels().is_loaded, reason="g++ is not installed on this machine"),
    pytest.mark.usefixtures("one_thread"),
]
# Decodes and chunks, short, and longer than the parts of 512 keys that a context is summed in.
SHARES = ((20, 1), (0, 1), (63, 1), (700, 1), (1300, 1), (5, 7), (0, 33), (500, 24), (1100, 70))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("window", [None, 24, 600])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_neighbours_change_no_bit(
    dtype: torch.dtype, window: int | None, soft_cap: float | None
) -> None:
    """A decode or chunk gets the same bits alone as between short and long neighbours."""
    case = Case(SHARES, head_dim=64, block_size=32, window=window, soft_cap=soft_cap, dtype=dtype)
    problem = draw(case)
    together = torch.split(solve(NativeBackend(), problem), [new for _, new in SHARES])
    for seq, expected in enumerate(together):
        alone = solve(NativeBackend(), only(problem, seq))
        assert torch.equal(alone, expected), f"sequence {SHARES[seq]} depends on its neighbours"


@DTYPES
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    """Two threads, which take tasks as they come, compute what one does."""
    problem = draw(Case(SHARES, head_dim=64, block_size=32, dtype=dtype))
    alone = solve(NativeBackend(), problem)
    torch.set_num_threads(2)
    assert torch.equal(solve(NativeBackend(), problem), alone)


@DTYPES
@pytest.mark.parametrize("block_size", [1, 8, 16, 128])
def test_block_sizes_change_few_bits(dtype: torch.dtype, block_size: int) -> None:
    """Vectors give the same bits from blocks of any size; only AMX wants blocks of 32."""
    problem = draw(Case(SHARES[:5], head_dim=32, block_size=32, dtype=dtype))
    other = draw(Case(SHARES[:5], head_dim=32, block_size=block_size, dtype=dtype))
    assert torch.equal(solve(NativeBackend(), problem), solve(NativeBackend(), other))


def test_chunks_change_no_bit_in_float32() -> None:
    """A prompt in chunks of 7, or token by token, gets the bits of the prompt in one piece."""
    problem = draw(Case(((0, 530),), head_dim=16, block_size=32))
    whole = solve(NativeBackend(), problem)
    for step in (7, 1):
        backend = NativeBackend()
        allocate(backend, problem)
        for start in range(0, 530, step):
            end = min(start + step, 530)
            batch = write(backend, problem, [start], [end])
            rows = backend.attend(problem.query[0][start:end], 0, batch, scale=problem.case.scale)
            assert torch.equal(rows, whole[start:end])


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 256])
@pytest.mark.parametrize("window", [None, 100])
def test_chunks_in_bfloat16(head_dim: int, window: int | None) -> None:
    """Chunks of every length modulo a matrix of rows are exact, on AMX where there is one."""
    shares = ((1, 3), (30, 5), (0, 11), (100, 40), (0, 150))
    case = Case(shares, 6, 2, head_dim, block_size=32, window=window, dtype=torch.bfloat16)
    problem = draw(case)
    output = solve(NativeBackend(), problem)
    torch.testing.assert_close(output.double(), problem.answer(), atol=2e-2, rtol=2e-2)


@DTYPES
@pytest.mark.parametrize("length", [1, 2, 31, 33, 127, 130])
def test_what_others_left_behind_the_last_token_is_never_read(
    dtype: torch.dtype, length: int
) -> None:
    """NaN in the rest of a block, in the same word even, changes no bit of decode and chunk."""
    problem = draw(Case(((length - 1, 1), (0, length)), head_dim=64, block_size=32, dtype=dtype))
    clean = solve(NativeBackend(), problem)
    backend = NativeBackend()
    allocate(backend, problem)
    size = problem.case.block_size * problem.num_blocks
    garbage = torch.full((size, 2, 64), float("nan"), dtype=dtype)
    everywhere = replace(write(backend, problem, [0, 0], [1, 1]), slot_mapping=torch.arange(size))
    backend.write_kv(0, garbage, garbage, everywhere)
    assert torch.equal(solve(backend, problem, keep_cache=True), clean)


def test_many_heads_on_one() -> None:
    """More query heads of one KV head than a tile has rows are one tile nevertheless."""
    problem = draw(Case(((40, 1), (3, 9)), 40, 1, 32, block_size=32, dtype=torch.bfloat16))
    output = solve(NativeBackend(), problem)
    torch.testing.assert_close(output.double(), problem.answer(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("num_seqs", "is_split"), [(1, True), (16, False)])
def test_a_long_context_is_split_while_there_is_little_to_do(num_seqs: int, is_split: bool) -> None:
    """The parts of one long decode are tasks of their own; of many decodes each is one task."""
    bounds = torch.arange(num_seqs + 1, dtype=torch.int32)
    lengths = torch.full((num_seqs,), 1500, dtype=torch.int32)
    table = torch.arange(num_seqs * 47, dtype=torch.int32).view(num_seqs, 47)
    plan = torch.ops.headrace.plan_attention(bounds, lengths, table, 32, 1, 3)
    assert len(plan) == (3 if is_split else num_seqs)
    assert plan[:, 1].unique().tolist() == list(range(num_seqs))


def test_tasks_cover_every_token_once_and_start_with_the_longest() -> None:
    """Tiles of at most 32 rows, the costly ones first."""
    bounds = torch.tensor([0, 1, 40, 103], dtype=torch.int32)
    lengths = torch.tensor([9, 39, 463], dtype=torch.int32)
    table = torch.arange(45, dtype=torch.int32).view(3, 15)
    plan = torch.ops.headrace.plan_attention(bounds, lengths, table, 32, 3, 4)
    tokens = sorted(t for row in plan.tolist() for t in range(row[1], row[1] + row[2]))
    assert tokens == list(range(103))
    costs = (plan[:, 2] * (plan[:, 3] + plan[:, 2])).tolist()
    assert costs == sorted(costs, reverse=True)
    assert plan[:, 2].max() == 8


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        (AttentionNeed(CPU, torch.float16), "not in torch.float16"),
        (AttentionNeed(CPU, torch.float32, 7), "not 7"),
        (AttentionNeed(CPU, torch.bfloat16, 512), "not 512"),
    ],
)
def test_what_it_cannot_take_is_named(need: AttentionNeed, reason: str) -> None:
    """The dtype or head size in the way is in the reason."""
    assert (NativeBackend.obstacle(need) or "").endswith(reason)


def test_without_kernels_the_reason_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler says so, and the next backend runs."""
    monkeypatch.setattr(native, "load_kernels", lambda: KernelStatus("install g++", None))
    obstacle = NativeBackend.obstacle(AttentionNeed(CPU, torch.float32, 64))
    assert obstacle == "the C++ kernels are missing: install g++"
