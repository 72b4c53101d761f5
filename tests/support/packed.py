"""Packing shares of sequences into one batch, over block tables that are scattered on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace_worker.attention import AttentionBackend, KVCacheSpec, PackedBatch
from headrace_worker.model import LoadedModel


@dataclass(frozen=True, slots=True)
class Share:
    """The new tokens of one sequence in a step: positions ``[start, start + len(token_ids))``."""

    token_ids: Sequence[int]
    start: int  # tokens already in the cache
    block_ids: Sequence[int]  # the sequence's blocks, in order of position


def pack(shares: Sequence[Share], block_size: int) -> PackedBatch:
    """Lay out a step; single tokens should come first, as the engine orders them."""
    ends = [share.start + len(share.token_ids) for share in shares]
    lengths = [len(share.token_ids) for share in shares]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    width = max(len(share.block_ids) for share in shares)
    table = torch.zeros(len(shares), width, dtype=torch.int32)
    slots, positions = [], []
    for row, (share, end) in enumerate(zip(shares, ends, strict=True)):
        table[row, : len(share.block_ids)] = torch.tensor(share.block_ids, dtype=torch.int32)
        position = torch.arange(share.start, end)
        positions.append(position)
        blocks = torch.tensor(share.block_ids)[position // block_size]
        slots.append(blocks * block_size + position % block_size)
    return PackedBatch(
        input_ids=torch.tensor([token for share in shares for token in share.token_ids]),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        cu_seqlens_q=bounds.int(),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        block_table=table,
        logit_rows=bounds[1:] - 1,
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(ends),
        num_decodes=sum(length == 1 for length in lengths),
    )


def scatter_blocks(
    lengths: Sequence[int], block_size: int, *, seed: int = 0, spare: int = 3
) -> tuple[list[list[int]], int]:
    """Return shuffled blocks for sequences of ``lengths`` tokens, and the size of the pool."""
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = 1 + sum(counts) + spare
    generator = torch.Generator().manual_seed(seed)
    shuffled = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    return [[shuffled.pop() for _ in range(count)] for count in counts], num_blocks


class PackedRun:
    """Sequences that advance together through a model, each with room for its whole life."""

    def __init__(
        self,
        model: LoadedModel,
        backend: AttentionBackend,
        prompts: Sequence[Sequence[int]],
        *,
        room: int = 0,  # tokens to generate after each prompt
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.backend = backend
        self.block_size = block_size
        self.tokens = [list(prompt) for prompt in prompts]
        self.computed = [0] * len(prompts)
        lengths = [len(prompt) + room for prompt in prompts]
        self.blocks, num_blocks = scatter_blocks(lengths, block_size)
        config = model.config
        spec = KVCacheSpec(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=torch.device("cpu"),
            block_size=block_size,
        )
        backend.allocate(spec, num_blocks)

    def step(self, advance: dict[int, int]) -> dict[int, torch.Tensor]:
        """Compute ``advance[seq]`` further tokens; return each one's logits ``[n, vocab]``."""
        order = sorted(advance, key=lambda seq: advance[seq] != 1)
        shares = [
            Share(
                self.tokens[seq][self.computed[seq] : self.computed[seq] + advance[seq]],
                self.computed[seq],
                self.blocks[seq],
            )
            for seq in order
        ]
        hidden = self.model.decoder.forward(pack(shares, self.block_size), self.backend)
        logits = self.model.decoder.logits(hidden).float()
        for seq in order:
            self.computed[seq] += advance[seq]
        return dict(zip(order, torch.split(logits, [advance[seq] for seq in order]), strict=True))

    def prefill(self, chunk: int) -> list[torch.Tensor]:
        """Compute all known tokens in chunks of at most ``chunk``; return logits per sequence."""
        parts: list[list[torch.Tensor]] = [[] for _ in self.tokens]
        while any(self._pending()):
            pending = self._pending()
            advance = {seq: min(chunk, left) for seq, left in enumerate(pending) if left}
            for seq, logits in self.step(advance).items():
                parts[seq].append(logits)
        return [torch.cat(part) for part in parts]

    def generate(self, num_tokens: int, chunk: int) -> list[list[int]]:
        """Generate greedily, chunks and decodes mixed; return the new ids of each sequence."""
        prompt_lens = [len(tokens) for tokens in self.tokens]
        goals = [length + num_tokens for length in prompt_lens]
        while active := [s for s, goal in enumerate(goals) if len(self.tokens[s]) < goal]:
            pending = self._pending()
            for seq, logits in self.step({s: min(chunk, pending[s]) for s in active}).items():
                if self.computed[seq] == len(self.tokens[seq]):
                    self.tokens[seq].append(int(logits[-1].argmax()))
        return [tokens[n:] for tokens, n in zip(self.tokens, prompt_lens, strict=True)]

    def _pending(self) -> list[int]:
        return [len(t) - done for t, done in zip(self.tokens, self.computed, strict=True)]


def greedy_by_transformers(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return what transformers generates greedily for one prompt, never stopping early."""
    with torch.no_grad():
        output = model.generate(
            torch.tensor([list(prompt)]),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        )
    new: list[int] = output[0, len(prompt) :].tolist()
    return new
