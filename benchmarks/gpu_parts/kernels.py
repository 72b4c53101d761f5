"""Attention of decodes and of prefill chunks, all layers of a step, by backend and model shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_parts.backends import Factory, backends_for
from benchmarks.gpu_parts.clock import Deadline, recorded, seconds_of
from benchmarks.gpu_parts.models import LARGE, SMALL, dtype_of, shape_of
from benchmarks.gpu_parts.packed import Layout, fill, lay_out
from benchmarks.gpu_parts.setup import Setup, Share, Sizes
from headrace_worker.attention import AttentionBackend, KVCacheSpec, PackedBatch

_MOST_OF_MEMORY = 0.6  # of what is free, for the cache of one measurement
_FEWEST_LAYERS, _MOST_LAYERS = 2, 64


@dataclass(frozen=True, slots=True)
class Heads:
    """What of a model its attention depends on."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int  # elements
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, setup: Setup, model: str) -> Heads:
        """Return those of a model at the size of this run."""
        shape, device = shape_of(setup, model), torch.device(setup.device)
        heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        return cls(model, heads, kv_heads, shape["head_dim"], dtype_of(setup), device)

    @property
    def kv_bytes(self) -> int:
        """Of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


def decode(setup: Setup) -> dict[str, Any]:
    """Return, for each batch of decodes, the bytes of keys and values that are read a second."""
    steps = [((length - 1, 1),) * count for count, length in setup.sizes.decodes]
    return _measure_all(setup, steps)


def prefill(setup: Setup) -> dict[str, Any]:
    """Return, for each step of chunks, the multiplications and additions a second."""
    return _measure_all(setup, setup.sizes.prefills)


def _measure_all(setup: Setup, steps: Sequence[tuple[Share, ...]]) -> dict[str, Any]:
    deadline, results, num_left_out = Deadline(setup.part_s), list[dict[str, Any]](), 0
    for heads, shares in _pairs(setup, steps):
        for name, make in backends_for(heads.device, heads.dtype, heads.head_dim).items():
            if deadline.left_s:
                found = {"backend": name, "model": heads.model, "shares": describe(shares)}
                results.append(found | _try_to_measure(heads, shares, make, setup.sizes))
            else:
                num_left_out += 1
    return {"cases": results, "num_left_out": num_left_out}


def _pairs(
    setup: Setup, steps: Sequence[tuple[Share, ...]]
) -> Iterator[tuple[Heads, tuple[Share, ...]]]:
    for shares in steps:
        for model in (SMALL, LARGE):
            yield Heads.of(setup, model), shares


def _try_to_measure(
    heads: Heads, shares: tuple[Share, ...], make: Factory, sizes: Sizes
) -> dict[str, Any]:
    try:
        return _measure(heads, shares, make, sizes)
    except Exception as failure:  # compilers raise what they like, and other cases may do
        return {"failure": f"{type(failure).__name__}: {failure}"}


def _measure(
    heads: Heads, shares: tuple[Share, ...], make: Factory, sizes: Sizes
) -> dict[str, Any]:
    """Time one step's attention in as many layers as no cache of the GPU can hold."""
    kv_bytes = sum(cached + new for cached, new in shares) * heads.kv_bytes
    num_layers = _num_layers(heads, kv_bytes, sizes.least_cache_bytes)
    backend = make()
    layout = lay_out(shares, backend.supported_block_sizes()[0])
    _allocate(backend, heads, layout, num_layers)
    batch = layout.step(heads.device)
    attend_all = _attention(backend, heads, batch, num_layers)
    work = recorded(attend_all, heads.device)
    seconds = seconds_of(work, heads.device, most_s=sizes.measure_s)
    return {
        "layer_s": seconds / num_layers,
        "kv_bytes_per_s": kv_bytes * num_layers / seconds,
        "flop_per_s": _flop(heads, shares) * num_layers / seconds,
    }


def describe(shares: Sequence[Share]) -> str:
    """Return a step of equal shares, or any other, in words."""
    parts = []
    for share in dict.fromkeys(shares):
        cached, new = share
        what = f"{cached + 1:,}" if new == 1 else f"{new:,} new" + (f" + {cached:,}" * bool(cached))
        parts.append(f"{shares.count(share)} × {what}")
    return ", ".join(parts)


def _allocate(backend: AttentionBackend, heads: Heads, layout: Layout, num_layers: int) -> None:
    spec = KVCacheSpec(
        num_layers, heads.kv_heads, heads.head_dim, heads.dtype, heads.device, layout.block_size
    )
    backend.allocate(spec, layout.num_blocks)
    num_keys = sum(cached + new for cached, new in layout.shares)
    shape = (num_keys, heads.kv_heads, heads.head_dim)
    key = torch.randn(shape, dtype=heads.dtype, device=heads.device)
    fill(backend, layout, num_layers, (key, key.flip(0)))


def _attention(backend: AttentionBackend, heads: Heads, batch: PackedBatch, num_layers: int) -> Any:
    shape = (batch.num_tokens, heads.heads, heads.head_dim)
    query = torch.randn(shape, dtype=heads.dtype, device=heads.device)
    backend.begin(batch)

    def attend_all() -> None:
        for layer in range(num_layers):
            backend.attend(query, layer, batch, scale=heads.head_dim**-0.5)

    return attend_all


def _flop(heads: Heads, shares: Sequence[Share]) -> float:
    """Of the two products of one layer: each new token with its own past and itself."""
    pairs = sum(new * cached + new * (new + 1) // 2 for cached, new in shares)
    return 4.0 * pairs * heads.heads * heads.head_dim


def _num_layers(heads: Heads, layer_bytes: int, least_bytes: int) -> int:
    """Return how many layers are timed together; raises MemoryError when their cache is too big."""
    wanted = min(max(-(-least_bytes // layer_bytes), _FEWEST_LAYERS), _MOST_LAYERS)
    if heads.device.type == "cuda":
        torch.cuda.empty_cache()  # of the case before
        free_bytes = torch.cuda.mem_get_info(heads.device)[0]
        # While it is filled, drawn keys and values stand beside it.
        if (wanted + 2) * layer_bytes > _MOST_OF_MEMORY * free_bytes:
            raise MemoryError(f"{wanted} layers of {layer_bytes} bytes, and {free_bytes} are free")
    return wanted
