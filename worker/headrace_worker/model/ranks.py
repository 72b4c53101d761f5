"""The ranks that share one model: each holds a part, and here the parts come together."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup


class Ranks:
    """One rank's view of all: who it is, and the collectives that a forward needs.

    Every rank has to call the same collectives in the same order. Alone, each of them returns what
    it is given. The first rank schedules and samples; see Megatron-LM (Shoeybi et al., 2019) for
    which products are cut how.
    """

    def __init__(self, rank: int, size: int, group: ProcessGroup | None) -> None:
        self.rank = rank  # 0 … size - 1
        self.size = size
        self._group = group  # None: alone

    @property
    def is_alone(self) -> bool:
        """Whether this rank holds the whole model."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this rank schedules and samples."""
        return self.rank == 0

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors of one shape, the same bits on each; may reuse it.

        On a CPU the parts are added in the order of their ranks, so that a row's sum depends on
        nothing but the row; a ring adds in an order that depends on the place in the tensor.
        """
        if self._group is None:
            return part
        part = part.contiguous()
        if part.device.type == "cpu" and self.size > 2:  # two numbers have one order
            first, *others = self._all_parts(self._group, part)
            for other in others:
                first += other
            return first
        self._group.allreduce([part]).wait()
        return part

    def gather_columns(self, part: torch.Tensor) -> torch.Tensor:
        """Return all ranks' ``[num_rows, num_columns]`` side by side on the first rank.

        The others, which have no use for them, keep their own.
        """
        if self._group is None:
            return part
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.is_first else []
        self._group.gather(parts, part, root=0).wait()
        return torch.cat(parts, dim=-1) if self.is_first else part

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the first rank's tensor; that of the others gives shape and dtype, and is lost."""
        if self._group is not None:
            self._group.broadcast(tensor, root=0).wait()
        return tensor

    def least(self, number: int, device: torch.device) -> int:
        """Return the smallest of all ranks' numbers."""
        if self._group is None:
            return number
        mine = torch.tensor([number], dtype=torch.int64, device=device)
        return int(torch.cat(self._all_parts(self._group, mine)).min())

    def _all_parts(self, group: ProcessGroup, part: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.size)]
        outputs: Any = [parts]  # one list for each tensor that is given
        group.allgather(outputs, [part]).wait()
        return parts


ALONE = Ranks(0, 1, None)


def num_words_of(ranks: Ranks, vocab_size: int) -> int:
    """Return how many rows of embedding and head each rank has room for, padding included."""
    return -(-vocab_size // ranks.size)
