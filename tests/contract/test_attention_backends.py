"""One suite for every attention backend: paged attention equals attention computed the long way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_worker.attention import (
    AttentionBackend,
    AttentionNeed,
    KVCacheSpec,
    UnusableBackend,
)
from support.attention_backends import BACKENDS, QUICK, Factory
from support.attention_cases import (
    CPU,
    Case,
    allocate,
    draw,
    only,
    poison,
    solve,
    write,
)
from support.packed import Share, pack

MIXED = ((20, 1), (0, 1), (63, 1), (5, 7), (0, 33), (40, 24))  # decodes, then chunks
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(params=BACKENDS)
def make(request: pytest.FixtureRequest) -> Factory:
    """Each backend that runs here, built anew at every call."""
    torch.set_num_threads(1)
    return BACKENDS[request.param]


def assert_solves(backend: AttentionBackend, case: Case) -> None:
    """Compare ``backend`` with the long answer; what it refuses, it never takes."""
    problem = draw(case)
    if backend.obstacle(AttentionNeed(CPU, case.dtype, case.head_dim)) is not None:
        with pytest.raises(UnusableBackend):
            allocate(backend, problem)
        return
    output = solve(backend, problem)
    assert output.dtype == case.dtype
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(output.double(), problem.answer(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_mixed_batch_in_every_dtype(make: Factory, dtype: torch.dtype) -> None:
    """Decodes and prefill chunks of ragged length in one batch get the exact attention."""
    assert_solves(make(), Case(MIXED, dtype=dtype))


@pytest.mark.parametrize("head_dim", [8, 32, 64, 80, 128, 256])
def test_head_sizes(make: Factory, head_dim: int) -> None:
    """Head sizes of current models work, and so does one that is no power of two."""
    assert_solves(make(), Case(MIXED, head_dim=head_dim))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (8, 1), (12, 2)])
def test_grouped_heads(make: Factory, heads: int, kv_heads: int) -> None:
    """Query heads share KV heads in order: head h reads KV head h // (heads / kv_heads)."""
    assert_solves(make(), Case(MIXED, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("window", [1, 2, 17, 64, 1000])
def test_sliding_windows(make: Factory, window: int) -> None:
    """A window counts the token itself, in decodes and in chunks; a wide one changes nothing."""
    assert_solves(make(), Case(MIXED, window=window))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 17])
def test_soft_capped_scores(make: Factory, dtype: torch.dtype, window: int | None) -> None:
    """Scores far beyond the cap are bent to it before the mask, in decodes and in chunks."""
    capped = Case(MIXED, heads=8, window=window, soft_cap=0.7, dtype=dtype)
    assert_solves(make(), capped)
    free = draw(replace(capped, soft_cap=None)).answer()
    assert (draw(capped).answer() - free).abs().max() > 0.1


def test_soft_capped_scores_of_a_long_chunk(make: Factory) -> None:
    """A chunk of hundreds of tokens is capped in every row."""
    assert_solves(make(), Case(((30, 300),), soft_cap=0.7))


def test_every_block_size_it_offers(make: Factory) -> None:
    """Each block size that a backend names pages correctly."""
    for block_size in make().supported_block_sizes():
        assert_solves(make(), Case(MIXED, block_size=block_size))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_lengths_around_a_block_boundary(make: Factory, length: int) -> None:
    """Decodes whose context just fits, fills or exceeds a block see exactly their keys."""
    assert_solves(make(), Case(((length - 1, 1), (0, length))))


@settings(max_examples=40, deadline=None)
@given(
    shares=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=6).map(
        lambda shares: tuple(sorted(shares, key=lambda share: share[1] != 1))
    ),
    block_size=st.sampled_from([1, 4, 16, 32]),
    window=st.none() | st.integers(1, 50),
    seed=st.integers(0, 2**31),
)
@pytest.mark.parametrize("name", QUICK)
def test_any_batch(
    name: str, shares: tuple[tuple[int, int], ...], block_size: int, window: int | None, seed: int
) -> None:
    """Whatever the lengths, the block size and the window, the result is exact."""
    torch.set_num_threads(1)
    case = Case(shares, head_dim=8, block_size=block_size, window=window, seed=seed)
    assert_solves(QUICK[name](), case)


def test_chunks_add_up_to_the_whole_prompt(make: Factory) -> None:
    """A prompt computed in chunks of 7 gets what it gets in one piece."""
    problem = draw(Case(((0, 40),)))
    whole = solve(make(), problem)
    backend = make()
    allocate(backend, problem)
    parts = []
    for start in range(0, 40, 7):
        end = min(start + 7, 40)
        batch = write(backend, problem, [start], [end])
        query = problem.query[0][start:end]
        parts.append(backend.attend(query, 0, batch, scale=problem.case.scale))
    torch.testing.assert_close(torch.cat(parts), whole, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_garbage_outside_a_sequence_never_leaks(
    make: Factory, garbage: float, window: int | None, soft_cap: float | None
) -> None:
    """Trash block, free blocks and the stale end of a block may hold anything at all."""
    problem = draw(Case(MIXED, window=window, soft_cap=soft_cap))
    backend = make()
    allocate(backend, problem)
    poison(backend, problem, garbage)
    output = solve(backend, problem, keep_cache=True)
    torch.testing.assert_close(output.double(), problem.answer(), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_a_broken_sequence_breaks_alone(make: Factory, soft_cap: float | None) -> None:
    """NaN in one sequence's cache shows in its own output, and in no neighbour's."""
    problem = draw(Case(MIXED, soft_cap=soft_cap))
    problem.key[0][3] = float("nan")
    problem.value[4][0] = float("nan")
    output = solve(make(), problem)
    per_sequence = torch.split(output, [new for _, new in problem.case.shares])
    broken = [bool(rows.isnan().any()) for rows in per_sequence]
    assert broken == [True, False, False, False, True, False]


def test_padding_rows_in_the_trash_block_change_nothing(make: Factory) -> None:
    """Rows that pad a batch write to block 0 and leave the live rows as they were (B47)."""
    problem = draw(Case(((20, 1), (5, 1))))
    alone = solve(make(), problem)
    padded = replace(
        problem,
        case=replace(problem.case, shares=(*problem.case.shares, (0, 1), (0, 1))),
        query=(*problem.query, problem.query[0], problem.query[1]),
        key=(*problem.key, problem.key[0][:1], problem.key[1][:1]),
        value=(*problem.value, problem.value[0][:1], problem.value[1][:1]),
        blocks=(*problem.blocks, (0,), (0,)),
    )
    torch.testing.assert_close(solve(make(), padded)[:2], alone, atol=2e-6, rtol=2e-6)


def test_where_the_blocks_lie_does_not_matter(make: Factory) -> None:
    """Scattered and consecutive block tables give the same bits."""
    scattered = draw(Case(MIXED))
    consecutive, first = [], 1
    for blocks in scattered.blocks:
        consecutive.append(tuple(range(first, first + len(blocks))))
        first += len(blocks)
    in_order = replace(scattered, blocks=tuple(consecutive))
    assert torch.equal(solve(make(), scattered), solve(make(), in_order))


def test_sequences_may_share_blocks(make: Factory) -> None:
    """Two sequences with the same prefix read it from the same blocks."""
    problem = draw(Case(((32, 1), (32, 5))))
    problem.key[1][:32] = problem.key[0][:32]
    problem.value[1][:32] = problem.value[0][:32]
    shared = (*problem.blocks[0][:2], *problem.blocks[1][2:])
    sharing = replace(problem, blocks=(problem.blocks[0], shared))
    output = solve(make(), sharing)
    torch.testing.assert_close(output.double(), problem.answer(), atol=2e-6, rtol=2e-6)


def test_reused_blocks_show_only_the_new_tokens(make: Factory) -> None:
    """A sequence in blocks that another one left behind never sees the other's keys."""
    backend, old, new = make(), draw(Case(((0, 48),))), draw(Case(((9, 4),), seed=1))
    allocate(backend, old)
    solve(backend, old, keep_cache=True)
    reusing = replace(new, blocks=old.blocks)
    output = solve(backend, reusing, keep_cache=True)
    torch.testing.assert_close(output.double(), new.answer(), atol=2e-6, rtol=2e-6)


def test_layers_are_separate(make: Factory) -> None:
    """What is written to one layer is not seen in another."""
    backend, first, second = make(), draw(Case(MIXED)), draw(Case(MIXED, seed=1))
    second = replace(second, blocks=first.blocks)
    allocate(backend, first, num_layers=2)
    solve(backend, first, layer=0, keep_cache=True)
    solve(backend, second, layer=1, keep_cache=True)
    again = solve(backend, first, layer=0, keep_cache=True)
    torch.testing.assert_close(again.double(), first.answer(), atol=2e-6, rtol=2e-6)


def test_strided_inputs_are_taken_as_they_are(make: Factory) -> None:
    """Query, key and value may be slices of one fused projection."""
    problem = draw(Case(MIXED))
    backend = make()
    expected = solve(backend, problem)
    lengths = [cached + new for cached, new in problem.case.shares]
    starts = [cached for cached, _ in problem.case.shares]
    batch = write(backend, problem, starts, lengths)
    rows = [slice(start, None) for start in starts]
    key = torch.cat([k[part] for k, part in zip(problem.key, rows, strict=True)])
    value = torch.cat([v[part] for v, part in zip(problem.value, rows, strict=True)])
    fused = torch.cat((torch.cat(problem.query), key, value), dim=1)
    backend.write_kv(0, fused[:, 4:6], fused[:, 6:], batch)
    output = backend.attend(fused[:, :4], 0, batch, scale=problem.case.scale)
    assert torch.equal(output, expected)


def test_a_sequence_alone_gets_the_same_answer(make: Factory) -> None:
    """Company in the batch changes a sequence by rounding at most."""
    problem = draw(Case(MIXED))
    together = torch.split(solve(make(), problem), [new for _, new in problem.case.shares])
    for seq, expected in enumerate(together):
        alone = solve(make(), only(problem, seq))
        torch.testing.assert_close(alone, expected, atol=2e-6, rtol=2e-6)


def test_a_long_context(make: Factory) -> None:
    """Two thousand cached keys are attended without loss, by a decode and by a chunk."""
    assert_solves(make(), Case(((2047, 1), (2000, 48)), head_dim=32))


def test_a_block_size_it_cannot_page_is_refused(make: Factory) -> None:
    """Allocating with an unknown block size names the size."""
    backend = make()
    spec = KVCacheSpec(1, 1, 8, torch.float32, CPU, block_size=7)
    assert 7 not in backend.supported_block_sizes()
    with pytest.raises(ValueError, match="block size 7"):
        backend.allocate(spec, 4)


def test_a_cache_of_only_the_trash_block_is_refused(make: Factory) -> None:
    """One block is none to use."""
    backend = make()
    spec = KVCacheSpec(1, 1, 8, torch.float32, CPU, backend.supported_block_sizes()[0])
    with pytest.raises(ValueError, match="trash block"):
        backend.allocate(spec, 1)


def test_short_rows_of_the_table_may_end_in_the_trash_block(make: Factory) -> None:
    """A short sequence beside a long one has trailing zeros in its block table."""
    problem = draw(Case(((3, 1), (100, 1))))
    table = pack([Share([0], 3, problem.blocks[0]), Share([0], 100, problem.blocks[1])], 16)
    assert table.block_table[0].tolist() == [problem.blocks[0][0], 0, 0, 0, 0, 0, 0]
    assert_solves(make(), problem.case)
