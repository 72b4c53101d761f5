"""What the CPU backend works out once a step for all layers: slots, length classes and masks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from headrace_worker.attention.base import PackedBatch
from headrace_worker.attention.slots import slots_of

_SMALLEST_CLASS = 64  # tokens; below this padding costs less than one more call


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Single new tokens whose sequences have the same length class, padded to one length."""

    rows: torch.Tensor  # [B] int64, their places in the packed batch
    seq_lens: torch.Tensor  # [B] int64, keys of each
    key_slots: torch.Tensor  # [B * padded_len] int64; beyond a sequence's end: its own first slot
    padded_len: int  # tokens, the length class
    _masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return what to add to the scores, ``[B, 1, 1, padded_len]`` of 0 and -inf."""
        if (window, dtype) not in self._masks:
            position = torch.arange(self.padded_len, device=self.rows.device)
            hidden = position >= self.seq_lens[:, None]
            if window is not None:
                hidden |= position < self.seq_lens[:, None] - window
            self._masks[window, dtype] = _additive(hidden, dtype)[:, None, None, :]
        return self._masks[window, dtype]


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The new tokens of one sequence: tokens ``[start, end)`` of the batch are its last ones."""

    start: int
    end: int
    key_slots: torch.Tensor  # [seq_len] int64
    _masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return ``[n, seq_len]`` to add to the scores; ``None``: plain causal, no earlier keys.

        Only a square problem may use SDPA's own causal flag, which aligns it to the top left.
        """
        num_new, seq_len = self.end - self.start, self.key_slots.shape[0]
        if num_new == seq_len and (window is None or window >= seq_len):
            return None
        return self.explicit_mask(window, dtype)

    def explicit_mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return ``[n, seq_len]`` to add to the scores, plain causal or not."""
        if (window, dtype) not in self._masks:
            num_new, seq_len = self.end - self.start, self.key_slots.shape[0]
            key_position = torch.arange(seq_len, device=self.key_slots.device)
            age = key_position[seq_len - num_new :, None] - key_position
            hidden = age < 0
            if window is not None:
                hidden |= age >= window
            self._masks[window, dtype] = _additive(hidden, dtype)
        return self._masks[window, dtype]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All work of one step: every token of the batch is in exactly one entry."""

    decodes: tuple[DecodePlan, ...]
    chunks: tuple[ChunkPlan, ...]


def plan_step(batch: PackedBatch, block_size: int) -> StepPlan:
    """Group single tokens by length class, and look up the slots of everything they attend to."""
    bounds = batch.cu_seqlens_q.tolist()
    seq_lens = batch.seq_lens.tolist()
    classes: dict[int, list[int]] = {}
    chunks = []
    for seq, seq_len in enumerate(seq_lens):
        if bounds[seq + 1] - bounds[seq] == 1:
            classes.setdefault(length_class(seq_len), []).append(seq)
        else:
            positions = torch.arange(seq_len, device=batch.block_table.device)
            slots = slots_of(batch.block_table[seq : seq + 1], positions[None], block_size)
            chunks.append(ChunkPlan(bounds[seq], bounds[seq + 1], slots.flatten()))
    decodes = tuple(
        _plan_decodes(batch, torch.tensor(seqs, device=batch.seq_lens.device), padded, block_size)
        for padded, seqs in classes.items()
    )
    return StepPlan(decodes, tuple(chunks))


def length_class(seq_len: int) -> int:
    """Return the padded length of a sequence: the next of 64, 96, 128, 192, 256, 384, ... tokens.

    It depends on ``seq_len`` alone, so neighbours cannot change how a sequence is computed.
    """
    padded = _SMALLEST_CLASS
    while padded < seq_len:
        if seq_len <= padded + padded // 2:
            return padded + padded // 2
        padded *= 2
    return padded


def _plan_decodes(
    batch: PackedBatch, seqs: torch.Tensor, padded_len: int, block_size: int
) -> DecodePlan:
    seq_lens = batch.seq_lens[seqs].long()
    position = torch.arange(padded_len, device=seqs.device)
    own_position = torch.where(position < seq_lens[:, None], position, 0)
    slots = slots_of(batch.block_table[seqs], own_position, block_size)
    rows = batch.cu_seqlens_q[:-1][seqs].long()
    return DecodePlan(rows, seq_lens, slots.flatten(), padded_len)


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
        hidden, float("-inf")
    )
