"""A runner over the oracle that samples in plain lists: for schedules by the thousand.

Scheduler, pool, engine, batch and cache are the real ones or the oracle's; only the sampler, whose
tensors take most of a step of a tiny model, is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence as ReadOnlyList

import torch

from headrace_worker.engine.batch import build_batch
from headrace_worker.engine.engine import RowResult
from headrace_worker.engine.messages import AddSequence, SampledToken, SequenceFailure
from headrace_worker.engine.scheduler import ScheduledSequence
from headrace_worker.engine.sequence import Sequence
from support.oracle_answer import choose_token
from support.oracle_backend import OracleBackend, OracleDecoder
from support.oracle_model import VOCAB_SIZE, hash_logits


class ListRunner:
    """Chooses tokens from what the oracle read back, as the real sampler must."""

    def __init__(self, decoder: OracleDecoder, backend: OracleBackend) -> None:
        self._decoder = decoder
        self._backend = backend

    def execute(self, scheduled: ReadOnlyList[ScheduledSequence]) -> list[RowResult]:
        """Compute one step; return a token or a failure for each share that samples."""
        batch = build_batch(scheduled, self._backend.block_size, torch.device("cpu"))
        hidden = self._decoder.forward(batch, self._backend).tolist()
        sampling = [share.seq for share in scheduled if share.samples]
        return [
            self._choose(seq, *hidden[row])
            for seq, row in zip(sampling, batch.logit_rows.tolist(), strict=True)
        ]

    def _choose(self, seq: Sequence, prefix_hash: int, last_token: int) -> RowResult:
        if last_token == self._decoder.nan_after:
            return SequenceFailure(seq.seq_id, "engine_failure", "NaN")
        ranks = hash_logits(prefix_hash)
        row = [(rank * VOCAB_SIZE + token_id) / 2048 - 4 for token_id, rank in enumerate(ranks)]
        command = AddSequence(seq.seq_id, (), seq.num_prompt_tokens, seq.sampling)
        return SampledToken(seq.seq_id, choose_token(row, command, seq.token_ids))
