"""Attention problems with an answer computed the long way, and how to put one to a backend."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from headrace_worker.attention import AttentionBackend, KVCacheSpec, PackedBatch
from support.packed import Share, pack, scatter_blocks

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """One step over sequences, given as (tokens already cached, new tokens) each."""

    shares: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16  # elements
    block_size: int = 16  # tokens
    window: int | None = None  # tokens
    soft_cap: float | None = None  # bound of the scores
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def scale(self) -> float:
        """Deliberately not the usual one, so that a backend must use what it is given."""
        return 0.9 / math.sqrt(self.head_dim)


@dataclass(frozen=True, slots=True)
class Problem:
    """A case with its numbers drawn: dense keys and values, and queries of the new tokens."""

    case: Case
    query: tuple[torch.Tensor, ...]  # per sequence [new, heads, head_dim]
    key: tuple[torch.Tensor, ...]  # per sequence [cached + new, kv_heads, head_dim]
    value: tuple[torch.Tensor, ...]  # the same shape
    blocks: tuple[tuple[int, ...], ...]  # per sequence
    num_blocks: int

    def answer(self) -> torch.Tensor:
        """Return ``[num_tokens, heads, head_dim]`` in float64, one token and head at a time."""
        rows = []
        for query, key, value in zip(self.query, self.key, self.value, strict=True):
            offset = key.shape[0] - query.shape[0]
            rows += [
                self._token(query[index], key, value, offset + index)
                for index in range(query.shape[0])
            ]
        return torch.stack(rows)

    def _token(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, position: int
    ) -> torch.Tensor:
        case = self.case
        first = 0 if case.window is None else max(0, position + 1 - case.window)
        visible = slice(first, position + 1)
        group = case.heads // case.kv_heads
        heads = []
        for head in range(case.heads):
            scores = key[visible, head // group].double() @ query[head].double() * case.scale
            if case.soft_cap is not None:
                scores = case.soft_cap * (scores / case.soft_cap).tanh()
            heads.append(scores.softmax(0) @ value[visible, head // group].double())
        return torch.stack(heads)


def draw(case: Case) -> Problem:
    """Draw the numbers of ``case`` and scatter its blocks."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, case.head_dim, generator=generator).to(case.dtype)

    lengths = [cached + new for cached, new in case.shares]
    blocks, num_blocks = scatter_blocks(lengths, case.block_size, seed=case.seed)
    return Problem(
        case=case,
        query=tuple(normal(new, case.heads) for _, new in case.shares),
        key=tuple(normal(length, case.kv_heads) for length in lengths),
        value=tuple(normal(length, case.kv_heads) for length in lengths),
        blocks=tuple(tuple(ids) for ids in blocks),
        num_blocks=num_blocks,
    )


def allocate(backend: AttentionBackend, problem: Problem, num_layers: int = 1) -> None:
    """Give ``backend`` a zero-filled cache that fits ``problem``."""
    case = problem.case
    spec = KVCacheSpec(num_layers, case.kv_heads, case.head_dim, case.dtype, CPU, case.block_size)
    backend.allocate(spec, problem.num_blocks)


def write(
    backend: AttentionBackend, problem: Problem, start: list[int], end: list[int], layer: int = 0
) -> PackedBatch:
    """Store positions ``[start, end)`` of each sequence that has any; return the batch used."""
    live = [seq for seq in range(len(start)) if start[seq] < end[seq]]
    batch = pack(
        [Share([0] * (end[s] - start[s]), start[s], problem.blocks[s]) for s in live],
        problem.case.block_size,
    )
    backend.begin(batch)
    rows = [slice(start[s], end[s]) for s in live]
    key = torch.cat([problem.key[s][part] for s, part in zip(live, rows, strict=True)])
    value = torch.cat([problem.value[s][part] for s, part in zip(live, rows, strict=True)])
    backend.write_kv(layer, key, value, batch)
    return batch


def solve(
    backend: AttentionBackend, problem: Problem, *, layer: int = 0, keep_cache: bool = False
) -> torch.Tensor:
    """Put ``problem`` to ``backend``: cache what came before, then compute the step."""
    if not keep_cache:
        allocate(backend, problem)
    cached = [cached for cached, _ in problem.case.shares]
    ends = [cached + new for cached, new in problem.case.shares]
    if any(cached):
        write(backend, problem, [0] * len(cached), cached, layer)
    batch = write(backend, problem, cached, ends, layer)
    case = problem.case
    return backend.attend(
        torch.cat(problem.query),
        layer,
        batch,
        scale=case.scale,
        window=case.window,
        soft_cap=case.soft_cap,
    )


def poison(backend: AttentionBackend, problem: Problem, value: float) -> None:
    """Fill every slot of the cache, trash block included, with ``value``, through the contract."""
    case = problem.case
    num_slots = problem.num_blocks * case.block_size
    blocks = list(range(problem.num_blocks))
    batch = pack([Share([0] * num_slots, 0, blocks)], case.block_size)
    rows = torch.full((num_slots, case.kv_heads, case.head_dim), value, dtype=case.dtype)
    backend.begin(batch)
    backend.write_kv(0, rows, rows, batch)


def only(problem: Problem, seq: int) -> Problem:
    """Return ``problem`` with sequence ``seq`` alone in the batch, numbers and blocks unchanged."""
    pick = slice(seq, seq + 1)
    return replace(
        problem,
        case=replace(problem.case, shares=problem.case.shares[pick]),
        query=problem.query[pick],
        key=problem.key[pick],
        value=problem.value[pick],
        blocks=problem.blocks[pick],
    )
