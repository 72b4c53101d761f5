"""The oracle between model and cache: it answers by every token that it reads back.

The cache holds ids and places, and the next token is a hash of what the block table leads to. A
wrong slot, block table, position or reused block changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from headrace_worker.attention.base import AttentionBackend, KVCacheSpec, PackedBatch
from support.oracle_model import ENTRY_BYTES, VOCAB_SIZE, hash_logits, hash_prefix, pack_entry


class OracleBackend(AttentionBackend):
    """Stores id and place where key and value would be; attending hashes all up to a token."""

    name: ClassVar[str] = "oracle"
    may_pad = False  # whether rows of padding are to be expected

    @classmethod
    def supported_block_sizes(cls) -> tuple[int, ...]:
        """Any will do."""
        return (4, 16, 8, 2, 1)

    def allocate(self, spec: KVCacheSpec, num_blocks: int) -> None:
        self.block_bytes = spec.block_size * ENTRY_BYTES
        self.block_size = spec.block_size  # tokens
        self.cache = bytearray(b"\xff" * (num_blocks * self.block_bytes))

    def begin(self, batch: PackedBatch) -> None:
        """Nothing is shared between layers: there is one."""

    def write_kv(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: PackedBatch
    ) -> None:
        """Store ids ``key`` and places ``value``, both ``[num_tokens]``."""
        slots = batch.slot_mapping.tolist()
        live = [slot for slot in slots if slot or not self.may_pad]
        assert slots[: len(live)] == live, "padding stands between live rows"
        assert min(live, default=self.block_size) >= self.block_size, "a live row writes the trash"
        for slot, token_id, place in zip(slots, key.tolist(), value.tolist(), strict=True):
            start = slot * ENTRY_BYTES
            self.cache[start : start + ENTRY_BYTES] = pack_entry(token_id, place)

    def attend(
        self,
        query: torch.Tensor,
        layer: int,
        batch: PackedBatch,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Return the hash of the prefix that ends with each new token, ``[num_tokens]``."""
        hashes = []
        places, bounds = batch.positions.tolist(), batch.cu_seqlens_q.tolist()
        tables = batch.block_table.tolist()
        assert bounds[-1] == len(places), "the ranges are not the batch"
        for index, length in enumerate(batch.seq_lens.tolist()):
            entries = self._read(tables[index], length)
            own = places[bounds[index] : bounds[index + 1]]
            hashes += [hash_prefix(entries[: (place + 1) * ENTRY_BYTES]) for place in own]
        return torch.tensor(hashes)

    def _read(self, blocks: list[int], length: int) -> bytes:
        used = blocks[: -(-length // self.block_size)]
        is_padding = self.may_pad and length == 1 and used == [0]
        assert is_padding or 0 not in used, "a live row reads the trash block"
        starts = [block * self.block_bytes for block in used]
        whole = b"".join(self.cache[start : start + self.block_bytes] for start in starts)
        return whole[: length * ENTRY_BYTES]


@dataclass
class OracleDecoder:
    """Turns the hash of a prefix into logits; knobs make it prefer tokens, or break."""

    bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    nan_after: int | None = None  # rows whose last token is this one come out as NaN
    on_forward: Callable[[PackedBatch], None] | None = None  # sees every batch

    def forward(self, batch: PackedBatch, backend: AttentionBackend) -> torch.Tensor:
        """Return [num_tokens, 2]: hash of the prefix, last token."""
        if self.on_forward:
            self.on_forward(batch)
        backend.begin(batch)
        backend.write_kv(0, batch.input_ids, batch.positions, batch)
        hashes = backend.attend(batch.input_ids, 0, batch, scale=1.0)
        return torch.stack([hashes, batch.input_ids], dim=1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[num_rows, VOCAB_SIZE]``, those of ``exact_logits`` but for the knobs."""
        ranks = b"".join(map(hash_logits, hidden[:, 0].tolist()))
        rows = torch.frombuffer(bytearray(ranks), dtype=torch.uint8).view(-1, VOCAB_SIZE)
        logits = (rows.float() * VOCAB_SIZE + torch.arange(VOCAB_SIZE)) / 2048 - 4
        for token_id, bias in self.bias.items():
            logits[:, token_id] += bias
        if self.nan_after is not None:
            logits[hidden[:, 1] == self.nan_after] = float("nan")
        return logits
