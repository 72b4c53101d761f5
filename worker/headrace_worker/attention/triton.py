"""Our own paged kernel in Triton: the CUDA backend wherever flash-attn cannot be used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_worker.attention.base import AttentionNeed, PackedBatch
from headrace_worker.attention.cuda import device_obstacle
from headrace_worker.attention.slots import SlotBackend

if TYPE_CHECKING:
    from headrace_worker.kernels_triton.shape import AttentionShape

_LOWEST_CAPABILITY = (8, 0)  # bfloat16 products
_LARGEST_HEAD = 256  # elements; a tile of larger ones does not fit
_MOST_PROGRAMS = 2048  # of a launch: some for each place on a large GPU, two to four an SM
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonBackend(SlotBackend):
    """One launch a layer for chunks and decodes, and one to merge the parts of long decodes."""

    name: ClassVar[str] = "triton"

    def __init__(self) -> None:
        super().__init__()
        self._work: _Work | None = None  # this step's, once a layer has asked for it

    @classmethod
    def obstacle(cls, need: AttentionNeed) -> str | None:
        """Say what is in the way: Triton itself, the device, the dtype or the head size."""
        if find_spec("triton") is None:
            return "Triton is not installed"
        is_interpreted = need.device.type == "cpu" and _is_interpreted()
        if not is_interpreted and (found := device_obstacle(need, _LOWEST_CAPABILITY)):
            return f"Triton: {found}"
        if need.dtype not in (None, *_DTYPES):
            return f"Triton: dtype {str(need.dtype).removeprefix('torch.')} is not supported"
        if need.head_dim is not None and need.head_dim > _LARGEST_HEAD:
            return f"Triton: head_dim {need.head_dim} is more than {_LARGEST_HEAD}"
        return None

    def begin(self, batch: PackedBatch) -> None:
        """Forget the last step's work; what this step's is depends on the layers' heads."""
        self._work = None

    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, heads, head_dim]
        layer: int,
        batch: PackedBatch,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Return the attention output ``[num_tokens, heads, head_dim]`` of each new token."""
        shape = self._shape(query, layer, window, soft_cap)
        if self._work is None or self._work.tile_tokens != shape.tile_tokens:
            self._work = _plan_work(batch, shape)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        _launch(
            output,
            query if query.stride(-1) == 1 else query.contiguous(),
            (self.cache.key[layer], self.cache.value[layer]),
            batch,
            work=self._work,
            factors=_factors(scale, soft_cap),
            shape=shape,
        )
        return output

    def _shape(
        self, query: torch.Tensor, layer: int, window: int | None, soft_cap: float | None
    ) -> AttentionShape:
        from headrace_worker.kernels_triton.shape import AttentionShape

        kv_heads = self.cache.key[layer].shape[1]
        return AttentionShape(
            group=query.shape[1] // kv_heads,
            kv_heads=kv_heads,
            head_dim=query.shape[2],
            block_size=self.cache.block_size,
            window=window,
            is_capped=soft_cap is not None,
            dtype=query.dtype,
        )


@dataclass(frozen=True, slots=True)
class _Work:
    """What one step computes, the same in all layers with the same heads."""

    item_seqs: torch.Tensor  # [most_items] int32; num_seqs: there is no such item
    item_parts: torch.Tensor  # [most_items] int32, tile of a chunk or partition of a decode
    num_items: torch.Tensor  # [1] int32
    num_parts: int  # partitions of the longest sequence, if it were a decode
    tile_tokens: int  # new tokens of a chunk's tile


def _plan_work(batch: PackedBatch, shape: AttentionShape) -> _Work:
    """List the work items on the device; their number is bounded without asking it."""
    num_parts = min(shape.max_parts, -(-batch.max_seqlen_k // shape.part_keys))
    num_chunks = 0 if batch.max_seqlen_q == 1 else batch.num_seqs
    bound = batch.num_seqs * num_parts
    if num_chunks:
        bound += batch.num_tokens // shape.tile_tokens + num_chunks
    num_new = batch.cu_seqlens_q.diff()
    own_parts = ((batch.seq_lens + shape.part_keys - 1) // shape.part_keys).clamp_(
        max=shape.max_parts
    )
    num_tiles = (num_new + shape.tile_tokens - 1) // shape.tile_tokens
    counts = torch.where(num_new == 1, own_parts, num_tiles)  # [num_seqs]
    ends = counts.cumsum(0)
    items = torch.arange(bound, device=ends.device)
    seqs = torch.searchsorted(ends, items, right=True)
    starts = torch.nn.functional.pad(ends, (1, 0))  # [num_seqs + 1]
    parts = items - starts[seqs]
    return _Work(seqs.int(), parts.int(), ends[-1:].int(), num_parts, shape.tile_tokens)


def _factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Return what scores are multiplied by, within the cap and outside: powers are of two."""
    if soft_cap is None:
        return scale * math.log2(math.e), 1.0
    return scale / soft_cap, soft_cap * math.log2(math.e)


def _launch(
    output: torch.Tensor,
    query: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],  # keys and values [num_slots, kv_heads, head_dim]
    batch: PackedBatch,
    *,
    work: _Work,
    factors: tuple[float, float],
    shape: AttentionShape,
) -> None:
    from headrace_worker.kernels_triton.paged_attention import attend_step, merge_parts

    num_seqs, num_parts = batch.num_seqs, work.num_parts
    num_results = num_seqs * shape.num_heads * num_parts if num_parts > 1 else 0
    sums = output.new_empty(num_results * shape.head_dim, dtype=torch.float32)
    stats = output.new_empty(2 * num_results, dtype=torch.float32)
    num_programs = min(len(work.item_seqs), max(1, _MOST_PROGRAMS // shape.kv_heads))
    attend_step[num_programs, shape.kv_heads](
        output, sums, stats, query, *cache, batch.block_table, batch.cu_seqlens_q, batch.seq_lens,
        work.item_seqs, work.item_parts, work.num_items, num_seqs, num_parts,
        batch.block_table.stride(0), query.stride(0), query.stride(1), *factors, shape,
        batch.max_seqlen_q > 1, num_warps=4, num_stages=2,
    )  # fmt: skip
    if num_parts > 1:
        merge_parts[num_seqs, shape.num_heads](
            output, sums, stats, batch.cu_seqlens_q, batch.seq_lens, num_seqs, num_parts, shape,
            num_warps=4,
        )  # fmt: skip


def _is_interpreted() -> bool:
    from headrace_worker.kernels_triton.shape import IS_INTERPRETED

    return IS_INTERPRETED
