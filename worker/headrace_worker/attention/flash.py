"""flash-attn on CUDA (Dao, 2023; Shah et al., 2024): one paged call a layer for a whole step."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from headrace_worker.attention.base import AttentionNeed, PackedBatch
from headrace_worker.attention.flash_library import FlashLibrary
from headrace_worker.attention.slots import SlotBackend

_AMPERE_AND_LATER = range(8, 100)
_HOPPER = range(9, 10)
_SHARED_ARGUMENTS = {"cu_seqlens_q", "max_seqlen_q", "softmax_scale", "causal", "window_size"}

FLASH_3 = FlashLibrary(
    title="flash-attn 3",
    modules=("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
    function="flash_attn_with_kvcache",
    arguments=frozenset({*_SHARED_ARGUMENTS, "softcap", "page_table", "cache_seqlens"}),
    majors=_HOPPER,
)
FLASH_2 = FlashLibrary(
    title="flash-attn 2",
    modules=("flash_attn.flash_attn_interface",),
    function="flash_attn_varlen_func",
    arguments=frozenset(
        {*_SHARED_ARGUMENTS, "softcap", "block_table", "cu_seqlens_k", "max_seqlen_k"}
    ),
    majors=_AMPERE_AND_LATER,
)


@dataclass(frozen=True, slots=True)
class _Pages:
    """One layer's cache as flash-attn wants it: views, nothing is copied."""

    key: torch.Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    value: torch.Tensor  # the same shape


class _FlashBackend(SlotBackend):
    """What both versions share: layout, refusals, and how a window and a soft cap are said."""

    name: ClassVar[str] = "flash"
    library: ClassVar[FlashLibrary]

    @classmethod
    def title(cls) -> str:
        """Return which major version it is."""
        return cls.library.title

    @classmethod
    def obstacle(cls, need: AttentionNeed) -> str | None:
        """Say what is in the way: the device, the installation, the dtype or the head size."""
        return cls.library.obstacle(need)

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
        return self._call(
            query,
            self._pages(layer),
            batch,
            scale=scale,
            # It counts the tokens before the own one; -1 and 0.0 are its words for "unlimited".
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=0.0 if soft_cap is None else soft_cap,
        )

    @abstractmethod
    def _call(
        self,
        query: torch.Tensor,
        pages: _Pages,
        batch: PackedBatch,
        *,
        scale: float,
        window_size: tuple[int, int],
        softcap: float,
    ) -> torch.Tensor:
        """Put the step to flash-attn; a causal mask is aligned to the bottom right by both."""

    def _pages(self, layer: int) -> _Pages:
        key, value = self.cache.key[layer], self.cache.value[layer]
        shape = (-1, self.cache.block_size, *key.shape[1:])
        return _Pages(key.view(shape), value.view(shape))


class Flash3Backend(_FlashBackend):
    """flash-attn 3, on Hopper: blocks of any size, split over the keys as it sees fit."""

    library: ClassVar[FlashLibrary] = FLASH_3

    def begin(self, batch: PackedBatch) -> None:
        """Nothing to derive: lengths and tables are taken as they are."""

    def _call(
        self,
        query: torch.Tensor,
        pages: _Pages,
        batch: PackedBatch,
        *,
        scale: float,
        window_size: tuple[int, int],
        softcap: float,
    ) -> torch.Tensor:
        return self.library.load()(
            query,
            pages.key,
            pages.value,
            cache_seqlens=batch.seq_lens,
            page_table=batch.block_table,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=batch.max_seqlen_q,
            softmax_scale=scale,
            causal=True,
            window_size=window_size,
            softcap=softcap,
        )


class Flash2Backend(_FlashBackend):
    """flash-attn 2, from Ampere on: blocks of 256 tokens or a multiple."""

    library: ClassVar[FlashLibrary] = FLASH_2

    def __init__(self) -> None:
        super().__init__()
        self._cu_seqlens_k: torch.Tensor | None = None  # [num_seqs + 1] int32, this step's

    @classmethod
    def supported_block_sizes(cls) -> tuple[int, ...]:
        """Its kernels page by 256 tokens."""
        return (256, 512, 1024)

    def begin(self, batch: PackedBatch) -> None:
        """Sum up the lengths, once for all layers; with a block table they mean nothing more."""
        sums = batch.seq_lens.cumsum(0, dtype=torch.int32)
        self._cu_seqlens_k = torch.nn.functional.pad(sums, (1, 0))

    def _call(
        self,
        query: torch.Tensor,
        pages: _Pages,
        batch: PackedBatch,
        *,
        scale: float,
        window_size: tuple[int, int],
        softcap: float,
    ) -> torch.Tensor:
        return self.library.load()(
            query,
            pages.key,
            pages.value,
            cu_seqlens_q=batch.cu_seqlens_q,
            cu_seqlens_k=self._cu_seqlens_k,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            softmax_scale=scale,
            causal=True,
            window_size=window_size,
            softcap=softcap,
            block_table=batch.block_table,
        )
