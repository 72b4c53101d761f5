"""flash-attn's two paged calls as its documentation has them, computed by our reference.

Signatures and checks follow flash-attn 2.8 (``flash_attn_varlen_func``, ``mha_varlen_fwd``) and
flash-attn 3 (``flash_attn_with_kvcache``, ``mha_fwd``): what is unknown, of the wrong dtype or of
the wrong shape is refused as the originals refuse it.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar

import torch

from headrace_worker.attention import AttentionNeed, PackedBatch
from headrace_worker.attention.flash import FLASH_2, FLASH_3, Flash2Backend, Flash3Backend
from headrace_worker.attention.flash_library import FlashLibrary
from headrace_worker.attention.reference import ReferenceBackend
from headrace_worker.attention.slots import SlotCache


class Flash2OnCpu(Flash2Backend):
    """The backend of flash-attn 2 over its stand-in, which runs anywhere and in any dtype."""

    library: ClassVar[FlashLibrary] = replace(FLASH_2, modules=(__name__,))

    @classmethod
    def obstacle(cls, need: AttentionNeed) -> str | None:
        """Nothing is in the stand-in's way."""
        return None


class Flash3OnCpu(Flash3Backend):
    """The backend of flash-attn 3 over its stand-in, which runs anywhere and in any dtype."""

    library: ClassVar[FlashLibrary] = replace(FLASH_3, modules=(__name__,))

    @classmethod
    def obstacle(cls, need: AttentionNeed) -> str | None:
        """Nothing is in the stand-in's way."""
        return None


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute version 2's call, for what an engine asks of it."""
    assert (dropout_p, alibi_slopes, deterministic, return_attn_probs) == (0.0, None, False, False)
    assert block_table is not None
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    _check_int32(cu_seqlens_k, len(cu_seqlens_q))
    seq_lens = cu_seqlens_k.diff().int()
    assert int(seq_lens.max()) == max_seqlen_k
    assert cu_seqlens_k[0] == 0
    return _attend(
        q, k, v, cu_seqlens_q, seq_lens, max_seqlen_q, block_table,
        causal=causal, scale=softmax_scale, window_size=window_size, softcap=softcap,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: None = None,
    v: None = None,
    qv: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    """Compute version 3's call, for what an engine asks of it."""
    assert (k, v, qv, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad) == (None,) * 7
    assert (cu_seqlens_k_new, rotary_seqlens, q_descale, k_descale, v_descale) == (None,) * 5
    assert (attention_chunk, return_softmax_lse) == (0, False)
    assert page_table is not None
    assert cache_seqlens is not None
    assert cu_seqlens_q is not None
    assert max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided"
    return _attend(
        q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, max_seqlen_q, page_table,
        causal=causal, scale=softmax_scale, window_size=window_size, softcap=softcap,
    )  # fmt: skip


def as_module(name: str, *functions: Any) -> ModuleType:
    """Return a module of ``name`` that holds ``functions``, to be put in ``sys.modules``."""
    module = ModuleType(name)
    for function in functions:
        setattr(module, function.__name__, function)
    return module


def _attend(
    q: torch.Tensor,  # [total_q, heads, head_dim]
    key: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_q: int,
    block_table: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    num_seqs = len(cu_seqlens_q) - 1
    _check_int32(cu_seqlens_q, num_seqs + 1)
    _check_int32(seq_lens, num_seqs)
    assert block_table.dtype == torch.int32
    assert block_table.shape[0] == num_seqs
    assert q.stride(-1) == key.stride(-1) == value.stride(-1) == block_table.stride(-1) == 1
    assert key.shape == value.shape
    assert q.shape[1] % key.shape[2] == 0
    new = cu_seqlens_q.diff()
    assert int(new.max()) == max_seqlen_q
    assert causal, "without it a query would see the keys after it"
    assert window_size[1] in (-1, 0), "causal or not, it may not look ahead"
    batch = PackedBatch(
        input_ids=torch.zeros(len(q), dtype=torch.int64),
        positions=_positions(new, seq_lens),
        slot_mapping=torch.zeros(len(q), dtype=torch.int64),
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        block_table=block_table,
        logit_rows=cu_seqlens_q[1:].long() - 1,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=int(seq_lens.max()),
        num_decodes=int((new == 1).sum()),
    )
    reference = ReferenceBackend()
    reference._cache = SlotCache((key.flatten(0, 1),), (value.flatten(0, 1),), key.shape[1])
    reference.begin(batch)
    return reference.attend(
        q,
        0,
        batch,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window=None if window_size[0] < 0 else window_size[0] + 1,
        soft_cap=softcap if softcap > 0 else None,
    )


def _positions(new: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Align to the bottom right: the last new token sees every key."""
    pairs = zip(new.tolist(), seq_lens.tolist(), strict=True)
    return torch.cat([torch.arange(length - count, length) for count, length in pairs])


def _check_int32(tensor: torch.Tensor, length: int) -> None:
    assert tensor.dtype == torch.int32
    assert tensor.shape == (length,)
    assert tensor.is_contiguous()
