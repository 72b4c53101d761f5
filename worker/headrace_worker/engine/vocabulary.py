"""Token ids of a request that the model has no row for: they never reach a device."""

from __future__ import annotations

from itertools import chain

from headrace_worker.engine.messages import SequenceFailure
from headrace_worker.engine.sequence import Sequence


def refuse_unknown_tokens(seq: Sequence, vocab_size: int) -> SequenceFailure | None:
    """Return why a sequence's tokens, biases or bad words cannot be used, or None when they can."""
    spec = seq.sampling
    if not all(spec.bad_words):
        return SequenceFailure(seq.seq_id, "invalid_request", "a bad word has no tokens")
    biased = (token_id for token_id, _ in spec.logit_bias)
    token_ids = [*seq.token_ids, *biased, *chain.from_iterable(spec.bad_words)]
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            message = f"token id {token_id} is outside the vocabulary of {vocab_size}"
            return SequenceFailure(seq.seq_id, "invalid_request", message)
    return None
