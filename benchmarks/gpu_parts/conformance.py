"""Each backend's attention on the device against the reference backend in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_parts.backends import Factory, backends_for, obstacles
from benchmarks.gpu_parts.clock import Deadline
from benchmarks.gpu_parts.models import dtype_of
from benchmarks.gpu_parts.packed import Layout, fill, lay_out
from benchmarks.gpu_parts.setup import Setup, Share
from headrace_worker.attention import KVCacheSpec
from headrace_worker.attention.reference import ReferenceBackend

# Of outputs that are means of normal numbers; 16-bit backends round the weights, too.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}


@dataclass(frozen=True, slots=True)
class Case:
    """One step of decodes and chunks."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int  # elements
    shares: tuple[Share, ...]
    window: int | None = None  # tokens
    soft_cap: float | None = None

    @property
    def scale(self) -> float:
        """Not the usual one, so that a backend has to use what it is given."""
        return 0.9 / float(self.head_dim**0.5)


_MIXED: tuple[Share, ...] = ((0, 1), (15, 1), (700, 1), (2050, 1), (0, 130), (600, 65), (3, 2))
_LONG: tuple[Share, ...] = ((8191, 1), (9000, 1))
_CHUNKS: tuple[Share, ...] = ((0, 257), (1000, 64))
CASES = (
    Case("groups of 2", 16, 8, 128, _MIXED),
    Case("groups of 4, long decodes", 32, 8, 128, _LONG),
    Case("groups of 3, heads of 64", 9, 3, 64, _MIXED),
    Case("window", 8, 4, 128, _MIXED, window=300),
    Case("heads of 256, window, soft cap", 8, 4, 256, _CHUNKS, window=100, soft_cap=30.0),
    Case("no groups, heads of 80", 6, 6, 80, _CHUNKS),
    Case("one KV head", 8, 1, 64, _MIXED),
)
_TINY_MIXED: tuple[Share, ...] = ((0, 1), (300, 1), (0, 7), (20, 5))
_NUM_IN_OTHER_DTYPES = 1
TINY_CASES = (
    Case("groups of 2", 4, 2, 16, _TINY_MIXED),
    Case("window, soft cap", 3, 1, 24, _TINY_MIXED, window=10, soft_cap=5.0),
)


def attention(setup: Setup) -> dict[str, Any]:
    """Put every case to every backend that takes it; say how many there was no time for."""
    device, deadline = torch.device(setup.device), Deadline(setup.part_s)
    cases = TINY_CASES if setup.is_tiny else CASES
    results: list[dict[str, Any]] = []
    num_left_out = 0
    for case, dtype in _pairs(cases):
        for name, make in backends_for(device, dtype, case.head_dim).items():
            if deadline.left_s:
                results.append(_judge(name, make, case, dtype, device))
            else:
                num_left_out += 1
    return {
        "cases": results,
        "num_left_out": num_left_out,
        "obstacles": obstacles(device, dtype_of(setup)),
    }


def _pairs(cases: Sequence[Case]) -> Iterator[tuple[Case, torch.dtype]]:
    """Yield every case in bfloat16, then the first ones in other dtypes: each pair is compiled."""
    for dtype in TOLERANCE:
        for case in cases if dtype == torch.bfloat16 else cases[:_NUM_IN_OTHER_DTYPES]:
            yield case, dtype


def _judge(
    name: str, make: Factory, case: Case, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Compare one step; a backend that raises has failed its case, and the others go on."""
    found = {"backend": name, "case": case.name, "dtype": str(dtype).removeprefix("torch.")}
    try:
        error = _largest_error(make, case, dtype, device)
    except Exception as failure:  # compilers raise what they like
        return {**found, "is_ok": False, "failure": f"{type(failure).__name__}: {failure}"}
    return {**found, "is_ok": error <= TOLERANCE[dtype], "largest_error": error}


def _largest_error(make: Factory, case: Case, dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest difference, beyond the same part of the value itself."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(tokens: int, heads: int) -> torch.Tensor:
        shape = (tokens, heads, case.head_dim)
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    num_keys = sum(cached + new for cached, new in case.shares)
    key_value = (draw(num_keys, case.kv_heads), draw(num_keys, case.kv_heads))
    query = draw(sum(new for _, new in case.shares), case.heads)
    found = _solve(make, case, query, key_value).float()
    exact = (key_value[0].float(), key_value[1].float())
    wanted = _solve(ReferenceBackend, case, query.float(), exact)
    difference = (found - wanted).abs() / (1 + wanted.abs())
    return float(difference.max()) if bool(found.isfinite().all()) else float("inf")


def _solve(
    make: Factory,
    case: Case,
    query: torch.Tensor,
    key_value: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    backend = make()
    layout = lay_out(case.shares, backend.supported_block_sizes()[0])
    _allocate(backend, case, layout, query)
    fill(backend, layout, 1, key_value)
    batch = layout.step(query.device)
    backend.begin(batch)
    return backend.attend(
        query, 0, batch, scale=case.scale, window=case.window, soft_cap=case.soft_cap
    )


def _allocate(backend: Any, case: Case, layout: Layout, query: torch.Tensor) -> None:
    spec = KVCacheSpec(
        1, case.kv_heads, case.head_dim, query.dtype, query.device, layout.block_size
    )
    backend.allocate(spec, layout.num_blocks)
