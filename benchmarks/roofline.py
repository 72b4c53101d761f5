"""The limits of this machine: matrix products of the model's shapes, memory, and what follows.

    python -m benchmarks.roofline

A product's rate is taken through the same packed operators that the engine uses. The limits assume
that nothing but products, or nothing but reads, takes time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.options import Options, parse
from benchmarks.workload import NUM_SHARED_PREFIX_TOKENS, Item, mixed, shared_prefix
from headrace_worker.catalogue import resolve
from headrace_worker.model.config import ModelConfig, read_config
from headrace_worker.model.int8 import int8_product
from headrace_worker.model.linear import Linear

ROWS = (1, 8, 64, 128, 256, 512)  # tokens in a step
_COPY_BYTES = 1 << 28
_LEAST_S, _LEAST_RUNS = 0.3, 3  # of a measurement
_BF16_BYTES = 2
Product = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""Takes the rows, in float32, and returns what multiplies them, in the format of the product."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides its cost."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Fused projections of a layer and the head: (out_features, in_features)."""
        num_qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return {
            "qkv": (num_qkv, self.hidden_size),
            "o": (self.hidden_size, self.num_heads * self.head_dim),
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
            "head": (self.vocab_size, self.hidden_size),
        }

    @property
    def layer_flop(self) -> float:
        """Of all layers' products, for one token."""
        per_layer = sum(2 * a * b for name, (a, b) in self.products.items() if name != "head")
        return self.num_layers * per_layer

    @property
    def head_flop(self) -> float:
        """Of the logits of one token."""
        out_features, in_features = self.products["head"]
        return 2 * out_features * in_features

    @property
    def weight_bytes(self) -> float:
        """In bfloat16, read once for each decode step."""
        return (self.layer_flop + self.head_flop) / 2 * _BF16_BYTES

    @property
    def kv_bytes(self) -> float:
        """Of one token in bfloat16."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _BF16_BYTES


def roofline(options: Options) -> dict[str, Any]:
    """Measure the machine, and derive what it allows for the mixed and the shared workload."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    shape = shape_of(options.model)
    rows = (1, 64) if options.is_quick else ROWS
    measured: dict[str, Any] = {
        "bandwidth_bytes_per_s": copy_bandwidth(),
        "bfloat16_flop_per_s": {n: step_rate(shape, n, _packed_bfloat16) for n in rows},
        "int8_op_per_s": {n: step_rate(shape, n, _int8) for n in rows},
    }
    loads = {"mixed": mixed(), "shared": shared_prefix()}
    cached = {"mixed": 0, "shared": len(loads["shared"]) - 1}  # prompts that find the prefix
    limits = {
        name: limit(shape, items, cached[name] * NUM_SHARED_PREFIX_TOKENS, measured)
        for name, items in loads.items()
    }
    lone_decode_s = shape.weight_bytes / measured["bandwidth_bytes_per_s"]
    return {**measured, "limits": limits, "lone_decode_s": lone_decode_s}


def shape_of(model: str) -> Shape:
    """Return a model's shape; raises ModelLoadError."""
    path = resolve(model)
    config = _gguf_config(path) if path.suffix == ".gguf" else read_config(path)
    return Shape(**{field.name: getattr(config, field.name) for field in fields(Shape)})


def limit(
    shape: Shape, items: list[Item], num_cached_tokens: int, measured: dict[str, Any]
) -> dict[str, float]:
    """Return the output tokens/s that products alone, and reads of the KV cache, would allow."""
    num_outputs = sum(item.num_output_tokens for item in items)
    num_computed = sum(item.num_tokens for item in items) - len(items) - num_cached_tokens
    flop = num_computed * shape.layer_flop + num_outputs * shape.head_flop
    read_bytes = shape.kv_bytes * sum(map(_num_tokens_read, items))
    bf16_s = flop / max(measured["bfloat16_flop_per_s"].values())
    int8_s = flop / max(measured["int8_op_per_s"].values())
    kv_s = read_bytes / measured["bandwidth_bytes_per_s"]
    return {
        "flop": flop,
        "kv_read_bytes": read_bytes,
        "bfloat16_products_tokens_per_s": num_outputs / bf16_s,
        "bfloat16_tokens_per_s": num_outputs / (bf16_s + kv_s),
        "int8_products_tokens_per_s": num_outputs / int8_s,
        "int8_tokens_per_s": num_outputs / (int8_s + kv_s),
    }


def copy_bandwidth() -> float:
    """Return bytes read and written per second by a copy larger than any cache."""
    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _seconds(lambda: target.copy_(source))


def step_rate(shape: Shape, num_rows: int, make: Callable[[int, int], Product]) -> float:
    """Return operations per second of a whole step's products, the head for every row.

    The layers are as many as the model has, with weights of their own, so that caches help a lone
    row no more than they do in a real step.
    """
    layer = [size for name, size in shape.products.items() if name != "head"]
    sizes = layer * shape.num_layers + [shape.products["head"]]
    products = [(make(*size), torch.randn(num_rows, size[1])) for size in sizes]
    calls = [product(rows) for product, rows in products]

    def step() -> None:
        for call in calls:
            call()

    return num_rows * (shape.layer_flop + shape.head_flop) / _seconds(step)


def _packed_bfloat16(out_features: int, in_features: int) -> Product:
    linear = Linear(torch.randn(out_features, in_features).bfloat16())
    linear.pack()

    def on(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        x = rows.bfloat16()
        return lambda: linear(x)

    return on


def _int8(out_features: int, in_features: int) -> Product:
    product = int8_product(torch.randn(out_features, in_features).bfloat16(), None)

    def on(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        x = rows.bfloat16()
        return lambda: product(x)

    return on


def _gguf_config(path: Path) -> ModelConfig:
    from headrace_worker.model.gguf import GgufModel  # needs a package that a GPU image may lack

    return GgufModel(path).config


def _num_tokens_read(item: Item) -> int:
    """Keys and values that the decodes of an item read, each its whole past once."""
    first, last = len(item.prompt) + 1, item.num_tokens - 1
    return (last - first + 1) * (first + last) // 2


def _seconds(work: Callable[[], object]) -> float:
    """Return the median time of a run, after one that warms up."""
    work()
    times_s: list[float] = []
    while sum(times_s) < _LEAST_S or len(times_s) < _LEAST_RUNS:
        start_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - start_s)
    return median(times_s)


if __name__ == "__main__":
    print(json.dumps(roofline(parse(__doc__ or "")), indent=1))
