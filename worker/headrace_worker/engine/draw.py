"""Drawing a token: randomness is a pure function of (seed, position), the rest is arithmetic.

Counter-based (Salmon et al., SC 2011): no generator holds state, so a token depends on nothing but
its own logits, its seed and its place: not on who shares the batch, not on preemption, not on the
worker that took over. Each draw is one uniform number looked up in the cumulative distribution of
the row. Rows never mix: every operation is along the vocabulary. The filters are top-k, top-p
(Holtzman et al., 2020) and min-p (Nguyen et al., 2024).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b

import torch

from headrace_worker.engine.transfer import to_device

_CHUNK = 256  # tokens summed at a time when a whole vocabulary is searched
_CANDIDATES = (64, 256, 1024)  # most likely tokens to look at; the smallest that will do
_TOP_P_CANDIDATES = 256  # most often more than a top-p of 0.95 keeps
_MORE = 8  # times as many, when those were not enough
_CPU_ROWS = 8  # rows worked on at a time, so that their vocabulary stays in the cache


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is drawn."""

    number: float  # in [0, 1), from ``uniform``
    temperature: float = 1.0  # positive
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # in (0, 1]
    min_p: float = 0.0  # in [0, 1]


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1), 53 bits, that decides the token at ``position``."""
    data = struct.pack("<QQ", seed, position)
    digest = blake2b(data, digest_size=8, person=b"headrace.draw").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw_tokens(logits: torch.Tensor, draws: Mapping[int, Draw]) -> dict[int, int]:
    """Draw a token for these rows of ``[num_rows, vocab]`` float32; each has a finite maximum."""
    tokens: dict[int, int] = {}
    for num_candidates, numbers in _batches(logits, draws):
        rows = _Rows(logits[numbers], [draws[number] for number in numbers])
        drawn = rows.draw_from_all() if num_candidates is None else rows.draw(num_candidates)
        tokens.update(zip(numbers, drawn.tolist(), strict=True))
    return tokens


@dataclass(frozen=True, slots=True)
class DrawnAhead:
    """Tokens that the host has not waited for."""

    rows: list[int]  # of the logits
    tokens: torch.Tensor  # [len(rows)] int64; of a row without a finite maximum anything
    is_sure: torch.Tensor  # [len(rows)] bool; elsewhere only ``draw_tokens`` knows the token
    may_be_unsure: bool  # whether any of them looked at some candidates only


def draw_ahead(logits: torch.Tensor, draws: Mapping[int, Draw]) -> DrawnAhead:
    """Draw as ``draw_tokens`` does, but look at the first candidates only: it need not wait.

    Rows without a finite maximum may be among them.
    """
    rows: list[int] = []
    tokens, is_sure, may_be_unsure = [], [], False
    for num_candidates, numbers in _batches(logits, draws):
        may_be_unsure |= num_candidates not in (None, logits.shape[-1])
        index = to_device(torch.tensor(numbers), logits.device)
        group = _Rows(logits[index], [draws[number] for number in numbers])
        drawn, is_complete = group.draw_once(num_candidates)
        rows += numbers
        tokens.append(drawn)
        is_sure.append(is_complete)
    nothing = torch.empty(0, dtype=torch.int64, device=logits.device)
    return DrawnAhead(
        rows,
        torch.cat((*tokens, nothing)),
        torch.cat((*is_sure, nothing.bool())),
        may_be_unsure,
    )


def _batches(
    logits: torch.Tensor, draws: Mapping[int, Draw]
) -> Iterator[tuple[int | None, list[int]]]:
    """Yield rows that are drawn at once, with how many candidates; None: all, unsorted."""
    for num_candidates, group in _group_rows(draws, logits.shape[-1]).items():
        at_once = _CPU_ROWS if logits.device.type == "cpu" else len(group)
        for start in range(0, len(group), at_once):
            yield num_candidates, group[start : start + at_once]


def _group_rows(draws: Mapping[int, Draw], vocab_size: int) -> dict[int | None, list[int]]:
    """Group rows by how many candidates their own filter asks for; None: all, unsorted."""
    groups: dict[int | None, list[int]] = {}
    for row, draw in draws.items():
        key: int | None = None
        if 0 < draw.top_k < vocab_size:
            enough = (size for size in _CANDIDATES if draw.top_k < size < vocab_size)
            key = next(enough, vocab_size)
        elif draw.top_p < 1:
            key = min(_TOP_P_CANDIDATES, vocab_size)
        groups.setdefault(key, []).append(row)
    return groups


class _Rows:
    """Rows that are drawn in the same way."""

    def __init__(self, logits: torch.Tensor, draws: list[Draw]) -> None:
        self._draws = draws
        self._numbers = _column([draw.number for draw in draws], logits)  # [rows, 1] float64
        temperatures = _column([draw.temperature for draw in draws], logits).to(logits.dtype)
        # The most likely token comes to 0, and so weighs 1.
        self._scaled = (logits - logits.amax(-1, keepdim=True)).div_(temperatures)  # [rows, vocab]

    def draw_once(self, num_candidates: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens ``[rows]``, and ``[rows]`` whether more candidates change nothing."""
        if num_candidates is None:
            tokens = self.draw_from_all()
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        return self._draw_from_some(num_candidates)

    def draw_from_all(self) -> torch.Tensor:
        """Search the whole vocabulary by token id: first the chunk, then the token; ``[rows]``."""
        weights = self._scaled.exp()
        if any(draw.min_p for draw in self._draws):
            min_p = _column([draw.min_p for draw in self._draws], weights)
            weights.masked_fill_(weights < min_p, 0)
        chunks = _cut(weights)
        ends = chunks.sum(-1, dtype=torch.float64).cumsum(-1)  # [rows, chunks]
        target = self._numbers * ends[:, -1:]
        chunk = _first_beyond(ends, target, ends[:, -1:])  # [rows, 1]
        within = chunks.gather(1, chunk[..., None].expand(-1, -1, _CHUNK)).squeeze(1)
        before = torch.where(chunk > 0, ends.gather(1, (chunk - 1).clamp(min=0)), 0)
        within_ends = within.cumsum(-1, dtype=torch.float64)
        offset = _first_beyond(within_ends, target - before, within_ends[:, -1:])
        last = self._scaled.shape[-1] - 1  # a row that is NaN may be drawn from the filling
        return (chunk * _CHUNK + offset).squeeze(-1).clamp_(max=last)

    def draw(self, num_candidates: int) -> torch.Tensor:
        """Search the kept tokens, most likely first, equal ones by id; ``[rows]``.

        When the kept ones may not all be among the candidates, more are looked at; however many
        there are, the result is the same to the bit.
        """
        drawn, is_complete = self._draw_from_some(num_candidates)
        if num_candidates == self._scaled.shape[-1]:
            return drawn
        if unsure := (~is_complete).nonzero().squeeze(-1).tolist():
            more = min(num_candidates * _MORE, self._scaled.shape[-1])
            drawn[unsure] = self._select(unsure).draw(more)
        return drawn

    def _draw_from_some(self, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, token_ids = self._most_likely(num_candidates)
        weights = values.exp().to(torch.float64)  # [rows, candidates], falling
        num_kept = self._count_kept(weights)  # [rows, 1]
        ends = weights.cumsum(-1)
        total = ends.gather(1, num_kept - 1)
        index = _first_beyond(ends, self._numbers * total, total)
        drawn = token_ids.gather(1, index).squeeze(-1)
        # No equal one outside, or only such as a mask has taken out, which weigh nothing.
        is_complete = values.gather(1, num_kept - 1) > values[:, -1:]
        is_complete |= values[:, -1:] == float("-inf")
        if num_candidates == self._scaled.shape[-1]:
            is_complete = torch.ones_like(is_complete)
        return drawn, is_complete.squeeze(-1)

    def _select(self, rows: list[int]) -> _Rows:
        selected = copy(self)
        selected._draws = [self._draws[row] for row in rows]
        selected._numbers, selected._scaled = self._numbers[rows], self._scaled[rows]
        return selected

    def _most_likely(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        if count == self._scaled.shape[-1]:
            return torch.sort(self._scaled, stable=True, dim=-1, descending=True)
        values, token_ids = self._scaled.topk(count, dim=-1)
        token_ids, order = token_ids.sort(-1)
        values, order = values.gather(1, order).sort(stable=True, dim=-1, descending=True)
        return values, token_ids.gather(1, order)

    def _count_kept(self, weights: torch.Tensor) -> torch.Tensor:
        """Apply top-k, then top-p to what is left, then min-p; each keeps a head of the weights."""
        vocab_size = self._scaled.shape[-1]
        limits = [draw.top_k or vocab_size for draw in self._draws]
        limit = to_device(torch.tensor(limits), weights.device)[:, None]
        top_k = limit.clamp(max=weights.shape[-1])
        ends = weights.cumsum(-1)
        whole = _sum_rows(self._scaled.exp())
        mass = torch.where(limit < vocab_size, ends.gather(1, top_k - 1), whole)
        top_p = _column([draw.top_p for draw in self._draws], weights)
        # A token stays while those before it do not reach top_p; with 1 all stay, rounding or not.
        in_top_p = ((ends - weights) < top_p * mass) | (top_p >= 1)
        in_min_p = weights >= _column([draw.min_p for draw in self._draws], weights)
        num_kept = torch.minimum(in_top_p.sum(-1, keepdim=True), in_min_p.sum(-1, keepdim=True))
        return torch.minimum(num_kept, top_k).clamp(min=1)


def _cut(weights: torch.Tensor) -> torch.Tensor:
    """Return ``[rows, chunks, _CHUNK]``, the last chunk filled up with zeros."""
    if pad := -weights.shape[-1] % _CHUNK:
        weights = torch.nn.functional.pad(weights, (0, pad))
    return weights.view(len(weights), -1, _CHUNK)


def _sum_rows(weights: torch.Tensor) -> torch.Tensor:
    """Return ``[rows, 1]`` float64, the same for a row alone as beside others.

    The sum of a single long row torch splits among its threads, those of chunks never.
    """
    return _cut(weights).sum(-1, dtype=torch.float64).sum(-1, keepdim=True)


def _column(numbers: list[float], like: torch.Tensor) -> torch.Tensor:
    return to_device(torch.tensor(numbers, dtype=torch.float64), like.device)[:, None]


def _first_beyond(ends: torch.Tensor, target: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return per row the first index whose cumulated weight exceeds the target.

    The target is kept below ``last``, the end of the draw: rounding never finds a weightless index.
    Where a row is NaN, whatever comes out is an index at least.
    """
    below_last = torch.minimum(target, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(ends, below_last, right=True).clamp_(max=ends.shape[-1] - 1)
