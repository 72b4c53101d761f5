"""A runner over the oracle that samples in plain lists: for schedules by the thousand.

Scheduler, pool, engine, batch and cache are the real ones or the oracle's; only the sampler, whose
tensors take most of a step of a tiny model, is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence as ReadOnlyList

import torch

from headrace_worker.engine.batch import build_batch
from headrace_worker.engine.engine import RowResult
from headrace_worker.engine.launched import ExecutedBatch
from headrace_worker.engine.messages import (
    AddSequence,
    PromptLogprobs,
    SampledToken,
    SequenceFailure,
    TokenScore,
)
from headrace_worker.engine.scheduler import ScheduledSequence
from headrace_worker.engine.sequence import Sequence
from support.oracle_answer import choose_token, log_softmax
from support.oracle_backend import OracleBackend, OracleDecoder
from support.oracle_model import VOCAB_SIZE, row_of_hash

_OF_A_POISONED_ROW = 0  # a device has something there, too; nobody hears of what follows from it


class ListRunner:
    """Chooses tokens from what the oracle read back, as the real sampler must."""

    def __init__(self, decoder: OracleDecoder, backend: OracleBackend) -> None:
        self._decoder = decoder
        self._backend = backend

        self._last: dict[int, int] = {}  # tokens of the step launched last, by seq_id

    def launch(self, scheduled: ReadOnlyList[ScheduledSequence]) -> ExecutedBatch:
        """Compute one step at once, and let it be told later; pending tokens are those of the last.

        The engine's lists lack them, so this is what a device knows and the host does not.
        """
        results = self.execute(scheduled)
        told = [result for result in results if isinstance(result, SampledToken)]
        self._last = {result.seq_id: result.token_id for result in told}
        return ExecutedBatch(results)

    def execute(self, scheduled: ReadOnlyList[ScheduledSequence]) -> list[RowResult]:
        """Compute one step; return a token or a failure for each share that samples."""
        batch = build_batch(scheduled, self._backend.block_size, torch.device("cpu"))
        for index, share in enumerate(scheduled):
            if share.seq.num_pending_tokens:
                batch.input_ids[index] = self._last.get(share.seq.seq_id, _OF_A_POISONED_ROW)
        hidden = self._decoder.forward(batch, self._backend).tolist()
        ends = batch.cu_seqlens_q.tolist()[1:]
        results = [
            self._score(share, hidden[end - share.num_new_tokens : end])
            for share, end in zip(scheduled, ends, strict=True)
            if share.scored
        ]
        failed = {told.seq_id for told in results if isinstance(told, SequenceFailure)}
        sampling = [share.seq for share in scheduled if share.samples]
        for seq, row in zip(sampling, batch.logit_rows.tolist(), strict=True):
            if seq.seq_id not in failed:
                results.append(self._choose(seq, *hidden[row]))
        return results

    def _score(self, share: ScheduledSequence, hidden: list[tuple[int, int]]) -> RowResult:
        seq, places = share.seq, share.scored
        first = places.start - 1 - seq.num_computed_tokens  # the row that the first comes from
        rows = hidden[first : first + len(places)]
        if any(last_token == self._decoder.nan_after for _, last_token in rows):
            return SequenceFailure(seq.seq_id, "engine_failure", "NaN")
        scores = []
        for place, (prefix_hash, _) in zip(places, rows, strict=True):
            logprobs = log_softmax(row_of_hash(prefix_hash))
            best = sorted(range(VOCAB_SIZE), key=lambda token_id: -logprobs[token_id])
            top = tuple((i, logprobs[i]) for i in best[: seq.sampling.prompt_logprobs])
            token_id = seq.token_ids[place]
            scores.append(TokenScore(token_id, logprobs[token_id], top))
        return PromptLogprobs(seq.seq_id, places.start, tuple(scores))

    def _choose(self, seq: Sequence, prefix_hash: int, last_token: int) -> RowResult:
        if last_token == self._decoder.nan_after:
            return SequenceFailure(seq.seq_id, "engine_failure", "NaN")
        command = AddSequence(seq.seq_id, (), seq.num_prompt_tokens, seq.sampling)
        token_ids = seq.token_ids
        if seq.num_pending_tokens:
            token_ids = [*token_ids, self._last.get(seq.seq_id, _OF_A_POISONED_ROW)]
        token_id = choose_token(row_of_hash(prefix_hash), command, token_ids)
        return SampledToken(seq.seq_id, token_id)
