"""The first rank orders from the others what it computes itself, and they get the same numbers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from headrace_worker.attention.base import PackedBatch
from headrace_worker.attention.reference import ReferenceBackend
from headrace_worker.engine.channel import ChannelClosed
from headrace_worker.engine.leading import FollowingDecoder, LeadingDecoder, RanksApart
from headrace_worker.engine.messages import Shutdown
from headrace_worker.engine.orders import Order, RunForward, RunLogits
from headrace_worker.engine.shared_batch import order_of, receive_batch, send_batch
from headrace_worker.model.ranks import ALONE, Ranks
from support.packed import Share, pack
from support.ranks import on_ranks

BATCH = pack([Share([7], 5, [3, 1]), Share([8, 9, 10], 0, [2])], block_size=4)
HIDDEN = torch.arange(12.0).view(4, 3)


class EchoDecoder:
    """Gives what it was asked with, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def forward(self, batch: PackedBatch, backend: object) -> torch.Tensor:
        if self._error:
            raise self._error
        return HIDDEN

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def lead(decoder: EchoDecoder, **options: Any) -> LeadingDecoder:
    """Return a first rank without others."""
    defaults: dict[str, Any] = {"order": lambda order: None, "explain": lambda: None}
    return LeadingDecoder(decoder, ranks=ALONE, **{**defaults, **options})


def test_a_batch_arrives_as_it_was_sent() -> None:
    """Tensors of both widths, an empty list of rows among them, and all sizes."""
    unsampled = pack([Share([7, 8], 0, [1])], block_size=4)
    object.__setattr__(unsampled, "logit_rows", torch.empty(0, dtype=torch.int64))

    def work(ranks: Ranks) -> list[PackedBatch]:
        if not ranks.is_first:
            orders = [order_of(batch) for batch in (BATCH, unsampled)]
            return [receive_batch(order, ranks, torch.device("cpu")) for order in orders]
        for batch in (BATCH, unsampled):
            send_batch(batch, ranks)
        return [BATCH, unsampled]

    sent, received = on_ranks(2, work)
    for one, other in zip(sent, received, strict=True):
        for field in fields(PackedBatch):
            wanted, got = getattr(one, field.name), getattr(other, field.name)
            same = torch.equal(got, wanted) if isinstance(wanted, torch.Tensor) else got == wanted
            assert same, field.name
            assert getattr(got, "dtype", None) == getattr(wanted, "dtype", None)


def test_an_order_comes_before_the_first_ranks_own_part() -> None:
    """Sizes and counts are all that it holds."""
    orders: list[Order] = []
    leading = lead(EchoDecoder(), order=orders.append)
    assert torch.equal(leading.forward(BATCH, ReferenceBackend()), HIDDEN)
    assert torch.equal(leading.logits(HIDDEN[BATCH.logit_rows]), HIDDEN[[0, 3]])
    sizes = {"num_tokens": 4, "num_seqs": 2, "table_width": 2, "num_logit_rows": 2}
    forward = RunForward(**sizes, max_seqlen_q=3, max_seqlen_k=6, num_decodes=1)
    assert orders == [forward, RunLogits(2)]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), RuntimeError("closed by peer")], ids=repr
)
def test_a_step_that_failed_on_one_rank_is_not_tried_again(error: Exception) -> None:
    """Not even where memory ran out: the others are past the point where this one would begin."""
    leading = lead(EchoDecoder(error))
    with pytest.raises(RanksApart, match=str(error)) as caught:
        leading.forward(BATCH, ReferenceBackend())
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    assert caught.value.__cause__ is error


def test_a_step_that_a_lost_rank_broke_off_says_what_became_of_it() -> None:
    """Not what the collective says, which is that somebody closed a connection."""

    def refuse(order: Order) -> None:
        raise ChannelClosed("closed")

    leading = lead(EchoDecoder(), order=refuse, explain=lambda: "rank 1: killed by signal 9")
    with pytest.raises(RanksApart, match=r"^rank 1: killed by signal 9$"):
        leading.logits(HIDDEN)


def test_a_rank_does_nothing_but_what_belongs_to_a_step() -> None:
    """A message of another kind is refused by its name."""
    decoder: Any = EchoDecoder()
    with pytest.raises(ValueError, match="Shutdown is no order of a step"):
        FollowingDecoder(decoder, ReferenceBackend(), ALONE).obey(Shutdown())
