"""Sequences that begin with the same blocks: who goes together, and that it changes no bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_worker.attention import create_backend
from headrace_worker.attention.native import NativeBackend
from headrace_worker.kernels import load_kernels
from support.attention_cases import CPU, Case, Problem, draw, only, solve

pytestmark = [
    pytest.mark.skipif(not load_kernels().is_loaded, reason="g++ is not installed on this machine"),
    pytest.mark.usefixtures("one_thread"),
]
NUM_JOINT, SHARED_KEYS = 8, 9  # columns of a plan


@dataclass(frozen=True, slots=True)
class Branch:
    """One sequence of a tree of prefixes."""

    parent: int  # earlier sequence, whose first keys it has; itself: none
    num_shared: int  # tokens that it has in common with the parent, at most
    tail: int  # cached tokens of its own
    num_new: int  # tokens of this step


def grow(branches: Sequence[Branch], case: Case) -> Problem:
    """Return a problem whose sequences share whole blocks as the branches say."""
    shared: list[int] = []
    cached: list[int] = []
    for branch in branches:
        known = cached[branch.parent] if branch.parent < len(cached) else 0
        shared.append(min(branch.num_shared, known) // case.block_size * case.block_size)
        cached.append(shared[-1] + branch.tail)
    shares = tuple((old, branch.num_new) for old, branch in zip(cached, branches, strict=True))
    problem = draw(replace(case, shares=shares))
    blocks = list(problem.blocks)
    for seq, branch in enumerate(branches):
        count = shared[seq] // case.block_size
        blocks[seq] = blocks[branch.parent][:count] + blocks[seq][count:]
        for rows in (problem.key, problem.value):
            rows[seq][: shared[seq]] = rows[branch.parent][: shared[seq]]
    return replace(problem, blocks=tuple(blocks))


@st.composite
def trees(draw_from: st.DrawFn) -> list[Branch]:
    """Two roots, one of them long, from which up to eight sequences branch, or off each other."""
    lengths = st.one_of(st.sampled_from([1100, 1024, 640, 512, 128]), st.integers(0, 1100))
    new = st.sampled_from([1, 1, 1, 1, 2, 5, 40])
    tails = (1100, draw_from(lengths))
    branches = [Branch(root, 0, tail, draw_from(new)) for root, tail in enumerate(tails)]
    for seq in range(2, draw_from(st.integers(3, 10))):
        parent, tail = draw_from(st.integers(0, seq - 1)), draw_from(st.integers(0, 200))
        branches.append(Branch(parent, draw_from(lengths), tail, draw_from(new)))
    return branches


@settings(max_examples=25, deadline=None)
@given(
    branches=trees(),
    head_dim=st.sampled_from([32, 64, 128]),
    block_size=st.sampled_from([16, 32, 256]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.sampled_from([None, None, 24, 300, 600]),
    soft_cap=st.sampled_from([None, None, 5.0]),
    group=st.sampled_from([1, 3]),
)
def test_a_shared_prefix_changes_no_bit(
    branches: list[Branch],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    soft_cap: float | None,
    group: int,
) -> None:
    """Whoever shares which prefixes, each sequence gets the bits that it gets alone."""
    case = Case((), 8 * group, 8, head_dim, block_size, window, soft_cap, dtype)
    problem = grow(branches, case)
    counts = [branch.num_new for branch in branches]
    together = torch.split(solve(NativeBackend(), problem), counts)
    for seq, rows in enumerate(together):
        assert torch.equal(solve(NativeBackend(), only(problem, seq)), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_shared", [128, 600, 1024])
@pytest.mark.parametrize("window", [None, 200])
def test_decodes_of_one_prefix_match_the_reference(
    dtype: torch.dtype, num_shared: int, window: int | None
) -> None:
    """What is computed jointly is what the reference backend computes."""
    branches = [Branch(0, num_shared, 10 + num_shared * (seq == 0), 1) for seq in range(9)]
    problem = grow(branches, Case((), 24, 8, 64, 32, window, dtype=dtype))
    found = solve(NativeBackend(), problem)
    wanted = solve(create_backend("reference", CPU), problem)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


def test_threads_change_no_bit_of_a_shared_prefix() -> None:
    """Two threads make shorter runs than one, and compute the same."""
    branches = [Branch(0, 700, 40 + 700 * (seq == 0), 1) for seq in range(9)]
    problem = grow(branches, Case((), 24, 8, 64, 32, dtype=torch.bfloat16))
    alone = solve(NativeBackend(), problem)
    torch.set_num_threads(2)
    assert torch.equal(solve(NativeBackend(), problem), alone)


def plan(
    rows: Sequence[Sequence[int]], length: int, *, num_new: int = 1, kv_heads: int = 8
) -> list[list[int]]:
    """Plan a step over block tables with blocks of 32 and three heads per KV head."""
    table = torch.tensor(rows, dtype=torch.int32)
    bounds = torch.arange(len(rows) + 1, dtype=torch.int32) * num_new
    lengths = torch.full((len(rows),), length, dtype=torch.int32)
    result = torch.ops.headrace.plan_attention(bounds, lengths, table, 32, kv_heads, 3)
    tasks: list[list[int]] = result.tolist()
    return tasks


def tables(prefixes: Sequence[int], num_shared: int, width: int) -> list[list[int]]:
    """Return block tables whose first ``num_shared`` blocks follow from ``prefixes``."""
    return [
        [1000 * prefix + i if i < num_shared else 100_000 + 100 * seq + i for i in range(width)]
        for seq, prefix in enumerate(prefixes, start=1)
    ]


def runs(tasks: list[list[int]]) -> list[tuple[set[int], int]]:
    """Return the sequences of each run, and the keys that they share."""
    starts = [i for i, task in enumerate(tasks) if task[NUM_JOINT] > 0]
    return [
        ({task[0] for task in tasks[i : i + tasks[i][NUM_JOINT]]}, tasks[i][SHARED_KEYS])
        for i in starts
    ]


def test_scattered_sequences_of_two_prefixes_are_found() -> None:
    """Sequences need not be neighbours in the batch to go together."""
    found = runs(plan(tables([1, 2, 1, 2, 2, 1], num_shared=9, width=12), 360))
    assert sorted(found, key=str) == [({0, 2, 5}, 256), ({1, 3, 4}, 256)]


def test_a_tile_is_filled_and_no_more() -> None:
    """Ten decodes with three rows each fit into a tile of 32; the rest makes another."""
    found = runs(plan(tables([1] * 23, num_shared=8, width=10), 300))
    assert sorted(len(seqs) for seqs, _ in found) == [3, 10, 10]
    assert set.union(*(seqs for seqs, _ in found)) == set(range(23))


def test_the_longer_prefix_wins() -> None:
    """A sequence that shares little does not cut short what two others share."""
    table = tables([1, 1, 1], num_shared=32, width=34)
    table[0][4:] = [50_000 + i for i in range(30)]
    assert sorted(runs(plan(table, 1080)), key=str) == [({0}, 0), ({1, 2}, 1024)]


@pytest.mark.parametrize(
    ("num_shared", "length", "expected"),
    [(3, 300, 0), (4, 300, 128), (7, 300, 128), (8, 257, 256), (8, 256, 128), (4, 128, 0)],
)
def test_only_whole_tiles_before_every_new_token_are_shared(
    num_shared: int, length: int, expected: int
) -> None:
    """Shared keys are whole tiles of 128 in shared blocks, and none of them is new."""
    tasks = plan(tables([1, 1], num_shared, width=12), length)
    assert {task[SHARED_KEYS] for task in tasks} == {expected}
    assert [task[NUM_JOINT] for task in tasks] == ([2, 0] if expected else [1, 1])


def test_short_chunks_go_together_and_whole_tiles_stay_alone() -> None:
    """The last tokens of chunks that do not fill a tile are joint, like decodes."""
    tasks = plan(tables([1, 1], num_shared=8, width=12), 300, num_new=12)
    assert sorted((task[2], task[NUM_JOINT]) for task in tasks) == [
        (2, 0),
        (2, 2),
        (10, 1),
        (10, 1),
    ]


def test_few_sequences_stay_apart_so_that_no_thread_is_idle() -> None:
    """With two threads, runs are no longer than leaves eight tasks for each."""
    torch.set_num_threads(2)
    rows = tables([1] * 8, num_shared=8, width=10)
    assert {len(seqs) for seqs, _ in runs(plan(rows, 300, kv_heads=4))} == {2}
    assert {len(seqs) for seqs, _ in runs(plan(rows, 300, kv_heads=2))} == {1}
