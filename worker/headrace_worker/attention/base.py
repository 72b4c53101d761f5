"""The contract between model and KV cache: one packed batch, two calls a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Everything one forward needs, without padding: decodes first, then prefill chunks.

    Sequence ``b`` owns the half-open token range ``[cu_seqlens_q[b], cu_seqlens_q[b + 1])``::

        input_ids   | d0 | d1 | c2 c2 c2 c2 | c3 c3 |      T = 8, B = 4, num_decodes = 2
        cu_seqlens_q  0    1    2             6       8

    Token ``t`` of sequence ``b`` attends to the first ``positions[t] + 1`` tokens of that sequence
    (bottom-right causal), found through ``block_table[b]``. Every attended key, new ones included,
    is in the cache once ``write_kv`` of that layer has run.
    """

    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64, place of the token within its sequence
    slot_mapping: torch.Tensor  # [num_tokens] int64, block_id * block_size + offset: its K/V
    cu_seqlens_q: torch.Tensor  # [num_seqs + 1] int32, prefix sums of the new tokens
    seq_lens: torch.Tensor  # [num_seqs] int32, keys after this step: computed + scheduled tokens
    block_table: torch.Tensor  # [num_seqs, max_blocks] int32, short rows end in the trash block 0
    logit_rows: torch.Tensor  # [num_sampling_rows] int64, tokens whose logits are wanted
    max_seqlen_q: int  # longest range of new tokens
    max_seqlen_k: int  # longest seq_len
    num_decodes: int  # leading sequences with exactly one new token

    @property
    def num_tokens(self) -> int:
        """Number of new tokens in the batch, T."""
        return int(self.input_ids.shape[0])

    @property
    def num_seqs(self) -> int:
        """Number of sequences in the batch, B."""
        return int(self.seq_lens.shape[0])


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What the KV cache must hold; the backend chooses the physical layout."""

    num_layers: int
    num_kv_heads: int
    head_dim: int  # elements
    dtype: torch.dtype
    device: torch.device
    block_size: int  # tokens per block

    @property
    def bytes_per_token(self) -> int:
        """k of the memory equation: 2 * layers * kv_heads * head_dim * itemsize."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class UnusableBackend(ValueError):
    """The backend runs on such devices, but not here or not this model; the message says why."""


@dataclass(frozen=True, slots=True)
class AttentionNeed:
    """What is asked of a backend before there is a cache, as far as it is known by then."""

    device: torch.device
    dtype: torch.dtype | None = None  # of keys, values and queries; None: not chosen yet
    head_dim: int | None = None  # elements; None: no model is loaded yet


class AttentionBackend(ABC):
    """Owns the KV cache and computes attention over it.

    The order of calls in a step is ``begin(batch)`` once, then for each layer ``write_kv`` and
    ``attend``. Block 0 is the trash block: it may be written by padding rows and is never read by a
    live row.
    """

    name: ClassVar[str]

    @classmethod
    def title(cls) -> str:
        """Return what tells this backend from another one of the same name."""
        return cls.name

    @classmethod
    def obstacle(cls, need: AttentionNeed) -> str | None:
        """Return why this backend cannot do what is needed, or ``None`` when it can.

        The reason names the value that is in the way; where something can be installed, it says so.
        """
        return None

    @classmethod
    @abstractmethod
    def supported_block_sizes(cls) -> tuple[int, ...]:
        """Return the block sizes in tokens that this backend takes, preferred first."""

    @abstractmethod
    def allocate(self, spec: KVCacheSpec, num_blocks: int) -> None:
        """Reserve a zero-filled cache of ``num_blocks`` blocks, the trash block counted."""

    @classmethod
    def check_cache(cls, spec: KVCacheSpec, num_blocks: int) -> None:
        """Refuse a cache that cannot be; ``allocate`` asks this first.

        Raises:
            UnusableBackend: the backend does not take the device, the dtype or the head size.
            ValueError: the block size is not supported, or no block is left to use.
        """
        need = AttentionNeed(spec.device, spec.dtype, spec.head_dim)
        if (obstacle := cls.obstacle(need)) is not None:
            raise UnusableBackend(obstacle)
        if spec.block_size not in cls.supported_block_sizes():
            raise ValueError(
                f"block size {spec.block_size} is not one of {cls.supported_block_sizes()}"
            )
        if num_blocks < 2:
            raise ValueError(f"{num_blocks} block(s) leave none besides the trash block")

    @abstractmethod
    def begin(self, batch: PackedBatch) -> None:
        """Derive whatever is shared by all layers of this step (masks, plans)."""

    @abstractmethod
    def write_kv(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: PackedBatch
    ) -> None:
        """Store keys and values ``[num_tokens, kv_heads, head_dim]`` at ``slot_mapping``."""

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, heads, head_dim]
        layer: int,
        batch: PackedBatch,
        *,
        scale: float,
        window: int | None = None,  # sliding window in tokens, own token counted; None: unlimited
        soft_cap: float | None = None,  # scores become cap * tanh(score / cap) before the mask
    ) -> torch.Tensor:
        """Return the attention output ``[num_tokens, heads, head_dim]`` of each new token."""
