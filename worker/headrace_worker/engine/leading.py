"""A decoder that is cut over ranks: what the first is asked to compute, the others compute too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from headrace_worker import model
from headrace_worker.attention.base import AttentionBackend, PackedBatch
from headrace_worker.engine.framing import Message
from headrace_worker.engine.orders import Order, RunForward, RunLogits
from headrace_worker.engine.runner import Decoder
from headrace_worker.engine.shared_batch import order_of, receive_batch, send_batch
from headrace_worker.model.ranks import Ranks


class RanksApart(RuntimeError):
    """A rank failed within a step, so the ranks no longer agree on what comes next."""


class LeadingDecoder:
    """Orders a forward or logits from the other ranks, then does its own part.

    The runner does not know that there are several. Whatever goes wrong within is not to be tried
    again, not even where memory ran out: the others wait for a collective that never comes.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        ranks: Ranks,
        order: Callable[[Order], None],
        explain: Callable[[], str | None],
    ) -> None:
        self._decoder = decoder
        self._ranks = ranks
        self._order = order  # sends to every other rank
        self._explain = explain  # what became of a rank, if one was lost

    def forward(self, batch: PackedBatch, backend: AttentionBackend) -> torch.Tensor:
        """Return the hidden state of every new token, ``[num_tokens, hidden]``."""
        with self._all_or_nothing():
            self._order(order_of(batch))
            send_batch(batch, self._ranks)
            return self._decoder.forward(batch, backend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[num_rows, vocab]``, float32 or narrower, for ``[num_rows, hidden]``."""
        with self._all_or_nothing():
            self._order(RunLogits(hidden.shape[0]))
            # Every rank has them, but only this one knows which rows are meant.
            return self._decoder.logits(self._ranks.share(hidden.contiguous()))

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a collective says no more than that it was cut off
            raise RanksApart(self._explain() or f"{type(error).__name__}: {error}") from error


class FollowingDecoder:
    """Obeys the orders of the first rank."""

    def __init__(self, decoder: model.Decoder, backend: AttentionBackend, ranks: Ranks) -> None:
        self._decoder = decoder
        self._backend = backend
        self._ranks = ranks

    @torch.inference_mode()
    def obey(self, order: Message) -> None:
        """Compute this rank's part; raises ValueError for an order that is none of a step."""
        match order:
            case RunForward():
                batch = receive_batch(order, self._ranks, self._decoder.embedding.device)
                self._decoder.forward(batch, self._backend)
            case RunLogits(num_rows):
                rows = self._decoder.embedding.new_empty(num_rows, self._decoder.config.hidden_size)
                self._decoder.logits(self._ranks.share(rows))
            case _:
                raise ValueError(f"{type(order).__name__} is no order of a step")
