"""What a paged attention kernel is compiled for: one instance, one machine program."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# The interpreter multiplies bfloat16 bit patterns as if they were integers, hence float32 there.
IS_INTERPRETED = bool(triton.knobs.runtime.interpret)

PART_KEYS = 256  # keys of a decode's partition at least; more would leave a GPU idle at batch 1
MAX_PARTS = 32  # partitions of a decode at most; more would cost memory at large batches

_TILE_BYTES = 16 * 1024  # of one tile of keys: two stages of keys and values fit every GPU
_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.float32 if IS_INTERPRETED else tl.bfloat16,
}


@dataclass(frozen=True)
class AttentionShape:
    """Constants of model, cache and layer; the tiles follow from them and from nothing else."""

    group: int  # query heads that share a KV head
    kv_heads: int
    head_dim: int  # elements
    block_size: int  # tokens
    window: int | None  # tokens, own token counted
    is_capped: bool  # whether scores are soft-capped
    dtype: torch.dtype  # of queries, keys and values

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.group * self.kv_heads

    @property
    def slot_stride(self) -> int:
        """Elements from one slot of the cache to the next."""
        return self.kv_heads * self.head_dim

    @property
    def dims(self) -> int:
        """The head size, rounded up to what tensor cores and ``arange`` take."""
        return max(16, _round_up(self.head_dim))

    @property
    def decode_rows(self) -> int:
        """Rows of a decode's product: the heads of a group, rounded up to a tensor core's."""
        return max(16, _round_up(self.group))

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk's product."""
        return max(64, _round_up(self.group))

    @property
    def tile_tokens(self) -> int:
        """New tokens of a chunk's tile; each is ``group`` rows."""
        return self.chunk_rows // self.group

    @property
    def tile_keys(self) -> int:
        """Keys that are taken at once."""
        return min(64, max(16, _TILE_BYTES // (self.dims * self.dtype.itemsize)))

    @property
    def part_keys(self) -> int:
        """Keys of a partition at least."""
        return PART_KEYS

    @property
    def max_parts(self) -> int:
        """Partitions at most, a power of two."""
        return MAX_PARTS

    @property
    def product(self) -> tl.dtype:
        """The type whose products the tensor cores add up in float32."""
        return _DTYPES[self.dtype]


def _round_up(size: int) -> int:
    """Return the next power of two."""
    return 1 << (size - 1).bit_length()
