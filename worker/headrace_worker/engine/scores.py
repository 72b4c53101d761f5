"""Log-probabilities as the model gave them, before any bias, penalty or filter.

Every operation is along the vocabulary, and equal logits stand by token id: a row's scores do not
depend on the rows beside it, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ReadOnlyList

import torch

from headrace_worker.engine.messages import TokenScore

LOGPROB_FLOOR = -9999.0  # finite, because JSON knows no infinity
MAX_ROWS = 64  # scored at a time, which bounds the memory that it takes
_CHUNK = 256  # tokens; only the chunks with the greatest maxima are searched


def score_tokens(
    logits: torch.Tensor,  # [num_rows, vocab] float32, each with a finite maximum
    token_ids: ReadOnlyList[int],  # one a row
    num_best: ReadOnlyList[int],  # how many of the most likely tokens to tell beside it, by row
) -> Iterator[TokenScore]:
    """Yield each row's score; a token beyond the vocabulary, padding, has the floor's."""
    num_wanted = min(max(num_best, default=0), logits.shape[-1])
    logprobs = logits.log_softmax(-1)
    best_ids = _most_likely(logits, num_wanted)  # [num_rows, num_wanted]
    best = logprobs.gather(1, best_ids).clamp_(min=LOGPROB_FLOOR).tolist()
    own = _gather(logprobs, token_ids)
    rows = zip(token_ids, num_best, own, best_ids.tolist(), best, strict=True)
    for token_id, count, logprob, ids, values in rows:
        pairs = zip(ids[:count], values[:count], strict=True)
        yield TokenScore(token_id, logprob, tuple(pairs))


def _gather(logprobs: torch.Tensor, token_ids: ReadOnlyList[int]) -> list[float]:
    columns = torch.tensor(token_ids, device=logprobs.device)[:, None]
    size = logprobs.shape[-1]
    found = logprobs.gather(1, columns.clamp(max=size - 1)).clamp_(min=LOGPROB_FLOOR)
    return torch.where(columns < size, found, LOGPROB_FLOOR).squeeze(1).tolist()


def _most_likely(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the ``count`` greatest, ``[num_rows, count]``, equal ones by id.

    So a shorter list is the head of a longer one, whoever asked for that.
    """
    size = logits.shape[-1]
    if count == 0:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    values, token_ids = _greatest(logits, min(count + 1, size))
    token_ids, order = token_ids.sort(-1)
    values, order = values.gather(1, order).sort(stable=True, dim=-1, descending=True)
    token_ids = token_ids.gather(1, order)[:, :count]
    if count < size:  # equal ones at the end: which of them were found is chance
        for row in (values[:, count - 1] == values[:, count]).nonzero().flatten().tolist():
            at_least = (logits[row] >= values[row, count - 1]).nonzero().squeeze(1)  # by id
            order = logits[row, at_least].sort(stable=True, descending=True).indices
            token_ids[row] = at_least[order[:count]]
    return token_ids


def _greatest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` greatest values and their ids, any of equal ones, as topk does.

    They are found in the ``count`` chunks with the greatest maxima: a value elsewhere has as many
    above it, or equal. That is one pass over the vocabulary.
    """
    num_chunks = logits.shape[-1] // _CHUNK
    if num_chunks <= 4 * count:
        return logits.topk(count, dim=-1)
    num_chunked = num_chunks * _CHUNK
    chunks = logits[:, :num_chunked].view(len(logits), num_chunks, _CHUNK)
    chosen = chunks.amax(-1).topk(count, dim=-1).indices  # [num_rows, count]
    within = torch.arange(_CHUNK, device=logits.device)
    tail = torch.arange(num_chunked, logits.shape[-1], device=logits.device)
    searched = (chosen[..., None] * _CHUNK + within).flatten(1)  # [num_rows, count * _CHUNK]
    searched = torch.cat((searched, tail.expand(len(logits), -1)), dim=1)
    values, places = logits.gather(1, searched).topk(count, dim=-1)
    return values, searched.gather(1, places)
