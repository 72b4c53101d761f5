"""The proof before the first request: packed and in chunks, a model computes what it computes."""

from __future__ import annotations

from typing import Any

import torch

from headrace_worker.attention.base import KVCacheSpec, PackedBatch
from headrace_worker.attention.reference import ReferenceBackend
from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.external.decoder import ExternalDecoder
from headrace_worker.model.external.probe import AttentionFacts

NUM_SEQS, NUM_TOKENS = 2, 8  # little enough for the largest model
_FIRST_CHUNKS = (5, 3)  # tokens of each sequence in the first step; the rest is the second
_BLOCK_SIZE = 4
_BLOCKS = ((3, 1), (2, 4))  # scattered on purpose
# How far the two may differ by rounding, as a share of the logits' own spread. What is computed
# wrongly differs by about as much as the logits themselves.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


def sample_tokens(vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return ``[NUM_SEQS, NUM_TOKENS]`` ids from all over the vocabulary."""
    ids = (torch.arange(NUM_SEQS * NUM_TOKENS) * 7919 + 11) % vocab_size
    return ids.view(NUM_SEQS, NUM_TOKENS).to(device)


@torch.inference_mode()
def plain_logits(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Return what the uncut model says of the tokens, ``[NUM_SEQS, NUM_TOKENS, vocab_size]``."""
    logits: torch.Tensor = model(input_ids=token_ids, use_cache=False).logits
    return logits.float()


def check_decoder(
    decoder: ExternalDecoder,
    facts: AttentionFacts,
    token_ids: torch.Tensor,  # [NUM_SEQS, NUM_TOKENS]
    expected: torch.Tensor,  # [NUM_SEQS, NUM_TOKENS, vocab_size], by the uncut model
    dtype: torch.dtype,
) -> None:
    """Run two sequences side by side in two steps, through a cache of scattered blocks.

    Raises:
        ModelLoadError: the logits differ by more than rounding.
    """
    backend = ReferenceBackend()
    spec = KVCacheSpec(
        num_layers=facts.num_layers,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        dtype=dtype,
        device=token_ids.device,
        block_size=_BLOCK_SIZE,
    )
    backend.allocate(spec, 1 + NUM_SEQS * len(_BLOCKS[0]))
    cuts = [(0, cut, NUM_TOKENS) for cut in _FIRST_CHUNKS]
    for step in (0, 1):
        ranges = [(cut[step], cut[step + 1]) for cut in cuts]
        hidden = decoder.forward(_batch(token_ids, ranges), backend)
        wanted = [expected[seq, start:end] for seq, (start, end) in enumerate(ranges)]
        _compare(decoder.logits(hidden), torch.cat(wanted), _TOLERANCES[dtype])


def _batch(token_ids: torch.Tensor, ranges: list[tuple[int, int]]) -> PackedBatch:
    """Pack the given range of each sequence's tokens."""
    device = token_ids.device
    positions = [torch.arange(start, end, device=device) for start, end in ranges]
    table = torch.tensor(_BLOCKS, dtype=torch.int32, device=device)
    slots = [
        table[seq, place // _BLOCK_SIZE] * _BLOCK_SIZE + place % _BLOCK_SIZE
        for seq, place in enumerate(positions)
    ]
    lengths = [end - start for start, end in ranges]
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0)
    return PackedBatch(
        input_ids=torch.cat([token_ids[seq, place] for seq, place in enumerate(positions)]),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots).long(),
        cu_seqlens_q=bounds.int(),
        seq_lens=torch.tensor([end for _, end in ranges], dtype=torch.int32, device=device),
        block_table=table,
        logit_rows=bounds[1:] - 1,
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(end for _, end in ranges),
        num_decodes=0,
    )


def _compare(got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    spread = (wanted - wanted.mean(dim=-1, keepdim=True)).norm(dim=-1)
    difference = float(((got - wanted).norm(dim=-1) / spread).max())
    if not difference <= tolerance:  # not a number is a difference, too
        raise ModelLoadError(
            "in a packed batch the model would compute something else: its logits differ by"
            f" {difference:.2g} of their spread, and rounding explains at most {tolerance:g}"
        )
