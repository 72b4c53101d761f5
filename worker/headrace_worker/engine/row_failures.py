"""Rows that are not finite: they fail their sequence, before its blocks can reach anybody else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass

import torch

from headrace_worker.engine.messages import SequenceFailure
from headrace_worker.engine.running import RowResult
from headrace_worker.engine.schedule import ScheduledSequence


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one sequence that a step computed."""

    seq_id: int
    start: int  # place of the first within the sequence
    length: int  # tokens

    @classmethod
    def of(cls, share: ScheduledSequence) -> Span:
        """Return that of a share whose step is not counted as computed yet."""
        return cls(share.seq.seq_id, share.seq.num_computed_tokens, share.num_new_tokens)


def rows_are_finite(hidden: torch.Tensor) -> torch.Tensor:
    """Return ``[num_tokens]`` bool for hidden states ``[num_tokens, hidden]``."""
    return torch.isfinite(hidden.sum(-1, dtype=torch.float32))


def find_failures(
    spans: ReadOnlyList[Span],
    row_is_finite: torch.Tensor,  # [num_tokens] bool, of the spans end to end
) -> Iterator[SequenceFailure]:
    """Yield the sequences with a token whose hidden state is not finite.

    A chunk need not be sampled for its keys and values to be read by others, through the prefix
    cache. As each token attends to itself, they are finite wherever the hidden state is.
    """
    is_finite: list[bool] = row_is_finite.tolist()
    end = 0
    for span in spans:
        start, end = end, end + span.length
        if False in is_finite[start:end]:
            place = span.start + is_finite.index(False, start) - start
            message = f"the hidden state of token {place} is not finite"
            yield SequenceFailure(span.seq_id, "engine_failure", message)


def drop_what_follows_a_failure(results: Iterable[RowResult]) -> Iterator[RowResult]:
    """Each sequence fails once, and nothing is told of it afterwards."""
    failed = set[int]()
    for result in results:
        if result.seq_id not in failed:
            yield result
        if isinstance(result, SequenceFailure):
            failed.add(result.seq_id)
