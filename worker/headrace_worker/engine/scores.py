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


def score_tokens(
    logits: torch.Tensor,  # [num_rows, vocab] float32, each with a finite maximum
    token_ids: ReadOnlyList[int],  # one a row
    num_best: ReadOnlyList[int],  # how many of the most likely tokens to tell beside it, by row
) -> Iterator[TokenScore]:
    """Yield each row's score; a token beyond the vocabulary, padding, has the floor's."""
    num_wanted = min(max(num_best, default=0), logits.shape[-1])
    logprobs = logits.log_softmax(-1).clamp_(min=LOGPROB_FLOOR)
    best_ids = _most_likely(logits, num_wanted)  # [num_rows, num_wanted]
    best = logprobs.gather(1, best_ids).tolist()
    own = _gather(logprobs, token_ids)
    rows = zip(token_ids, num_best, own, best_ids.tolist(), best, strict=True)
    for token_id, count, logprob, ids, values in rows:
        pairs = zip(ids[:count], values[:count], strict=True)
        yield TokenScore(token_id, logprob, tuple(pairs))


def _gather(logprobs: torch.Tensor, token_ids: ReadOnlyList[int]) -> list[float]:
    columns = torch.tensor(token_ids, device=logprobs.device)[:, None]
    size = logprobs.shape[-1]
    found = logprobs.gather(1, columns.clamp(max=size - 1))
    return torch.where(columns < size, found, LOGPROB_FLOOR).squeeze(1).tolist()


def _most_likely(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the ``count`` greatest, ``[num_rows, count]``, equal ones by id.

    So a shorter list is the head of a longer one, whoever asked for that.
    """
    size = logits.shape[-1]
    if count == 0:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    values, token_ids = logits.topk(min(count + 1, size), dim=-1)
    token_ids, order = token_ids.sort(-1)
    values, order = values.gather(1, order).sort(stable=True, dim=-1, descending=True)
    token_ids = token_ids.gather(1, order)[:, :count]
    if count < size:  # equal ones at the end: topk does not say which of them it takes
        for row in (values[:, count - 1] == values[:, count]).nonzero().flatten().tolist():
            at_least = (logits[row] >= values[row, count - 1]).nonzero().squeeze(1)  # by id
            order = logits[row, at_least].sort(stable=True, descending=True).indices
            token_ids[row] = at_least[order[:count]]
    return token_ids
