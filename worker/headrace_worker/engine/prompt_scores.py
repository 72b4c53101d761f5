"""Prompt log-probabilities: the hidden state of each prompt token scores the one after it.

A chunk of a prompt may be thousands of tokens, and its logits more than fits: they are computed,
and forgotten, a slice of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as ReadOnlyList
from itertools import accumulate, islice

import torch

from headrace_worker.engine.messages import PromptLogprobs, SequenceFailure, TokenScore
from headrace_worker.engine.schedule import ScheduledSequence
from headrace_worker.engine.scores import MAX_ROWS, score_tokens

ComputeLogits = Callable[[torch.Tensor], torch.Tensor]  # [num_rows, hidden] → [num_rows, vocab]


def score_prompts(
    scheduled: ReadOnlyList[ScheduledSequence],
    hidden: torch.Tensor,  # [num_tokens, hidden], of the packed batch in the order of the shares
    compute_logits: ComputeLogits,
) -> list[PromptLogprobs | SequenceFailure]:
    """Score what this step reaches of the prompts whose scores are owed.

    A row without a finite maximum fails its sequence alone.
    """
    ends = accumulate(share.num_new_tokens for share in scheduled)
    owing = [(share, end) for share, end in zip(scheduled, ends, strict=True) if share.scored]
    scores = _score_rows(owing, hidden, compute_logits)
    return [_tell(share, list(islice(scores, len(share.scored)))) for share, _ in owing]


def _score_rows(
    owing: list[tuple[ScheduledSequence, int]],  # with the row after each one's last
    hidden: torch.Tensor,
    compute_logits: ComputeLogits,
) -> Iterator[TokenScore | None]:
    """Yield the scores of all shares end to end; None for a row that cannot be trusted."""
    rows: list[int] = []
    token_ids: list[int] = []
    num_best: list[int] = []
    for share, end in owing:
        seq, places = share.seq, share.scored
        assert places.start > seq.num_computed_tokens, "what is cached has no logits"
        offset = end - share.num_new_tokens - seq.num_computed_tokens - 1  # a token earlier
        rows += range(offset + places.start, offset + places.stop)
        token_ids += seq.token_ids[places.start : places.stop]
        num_best += [seq.sampling.prompt_logprobs or 0] * len(places)
    for start in range(0, len(rows), MAX_ROWS):
        here = slice(start, start + MAX_ROWS)
        logits = compute_logits(hidden[rows[here]])
        is_sound = torch.isfinite(logits.amax(-1)).tolist()
        scores = score_tokens(logits, token_ids[here], num_best[here])
        yield from (score if ok else None for score, ok in zip(scores, is_sound, strict=True))


def _tell(
    share: ScheduledSequence, scores: list[TokenScore | None]
) -> PromptLogprobs | SequenceFailure:
    seq_id, start = share.seq.seq_id, share.scored.start
    sound = tuple(score for score in scores if score)
    if len(sound) == len(scores):
        return PromptLogprobs(seq_id, start, sound)
    message = f"the logits of prompt token {start + scores.index(None)} have no finite maximum"
    return SequenceFailure(seq_id, "engine_failure", message)
