"""The largest step that may ever come, computed in the trash block to see what memory it takes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from headrace_worker.attention.base import AttentionBackend, PackedBatch
from headrace_worker.engine.block_pool import TRASH_BLOCK
from headrace_worker.engine.draw import Draw, draw_ahead
from headrace_worker.engine.runner import Decoder

# Tokens of a context from which on attention takes no more memory: it is cut into no more parts.
_LONG_CONTEXT = 16_384


@dataclass(frozen=True, slots=True)
class LargestStep:
    """As many sequences as may run, all of them long, and the rest of the budget in one chunk."""

    num_tokens: int  # token budget
    num_seqs: int
    num_rows: int  # most rows whose logits are there at once
    max_model_len: int  # tokens, prompt and output together
    block_size: int  # tokens
    num_steps_in_flight: int  # 1, or 2 with one scheduled ahead, whose logits are kept, too
    max_num_keys: int | None = None  # tokens that the KV cache will hold; None: not known yet

    def batch(self, device: torch.device) -> PackedBatch:
        """Return its batch; all that it writes and reads is in the trash block."""
        num_new = self._new_tokens()
        context = self._longest_context(len(num_new))
        ends = [max(count, context) for count in num_new]
        spans = zip(num_new, ends, strict=True)
        positions = list(chain.from_iterable(range(end - count, end) for count, end in spans))
        width = -(-max(ends) // self.block_size)
        num_tokens = len(positions)
        rows = torch.arange(self.num_rows, device=device) % num_tokens
        return PackedBatch(
            input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, device=device),
            slot_mapping=torch.full(
                (num_tokens,), TRASH_BLOCK * self.block_size, dtype=torch.int64, device=device
            ),
            cu_seqlens_q=_int32([0, *accumulate(num_new)], device),
            seq_lens=_int32(ends, device),
            block_table=torch.full(
                (len(num_new), width), TRASH_BLOCK, dtype=torch.int32, device=device
            ),
            logit_rows=rows,
            max_seqlen_q=max(num_new),
            max_seqlen_k=max(ends),
            num_decodes=num_new.count(1),
        )

    @torch.inference_mode()
    def run(self, decoder: Decoder, backend: AttentionBackend, device: torch.device) -> None:
        """Compute it, with draws that take the most; its cache must have a trash block."""
        batch = self.batch(device)
        hidden = decoder.forward(batch, backend)[batch.logit_rows]
        logits = decoder.logits(hidden).float()
        draws = {row: Draw(0.5, top_p=0.9) for row in range(len(logits))}
        kept = [logits.clone() for _ in range(self.num_steps_in_flight)]  # as requests change them
        draw_ahead(kept[0], draws)

    def _longest_context(self, num_seqs: int) -> int:
        """Return the tokens that each of so many can have at once, as far as it counts."""
        longest = min(self.max_model_len, _LONG_CONTEXT)
        if self.max_num_keys is None:
            return longest
        return max(1, min(longest, self.max_num_keys // num_seqs))

    def _new_tokens(self) -> list[int]:
        """Return each sequence's, decodes first; a chunk is no longer than a context."""
        num_decodes = min(self.num_seqs, self.num_tokens) - 1
        rest = self.num_tokens - num_decodes
        return [1] * num_decodes + [min(rest, self.max_model_len)]


def _int32(numbers: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)
