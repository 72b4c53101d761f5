"""Drawing a token: randomness is a pure function of (seed, position), the rest is arithmetic.

No generator holds state, so a token depends on nothing but its own logits, its seed and its place:
not on who shares the batch, not on preemption, not on the worker that took over. Each draw is one
uniform number looked up in the cumulative distribution of the row. Rows never mix: every operation
is along the vocabulary.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b

import torch

_CHUNK = 256  # tokens summed at a time when a whole vocabulary is searched
_CANDIDATES = (
    64,
    256,
    1024,
)  # how many of the most likely tokens to look at, smallest that will do


@dataclass(frozen=True, slots=True)
class Filter:
    """Which tokens of a row stay in the draw."""

    top_k: int  # 0 keeps all
    top_p: float  # in (0, 1]
    min_p: float  # in [0, 1]


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1), 53 bits, that decides the token at ``position``."""
    data = struct.pack("<QQ", seed, position)
    digest = blake2b(data, digest_size=8, person=b"headrace.draw").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw_tokens(
    scaled: torch.Tensor,  # [num_rows, vocab] float32, logits over temperature
    filters: list[Filter],
    uniforms: list[float],
) -> list[int]:
    """Draw one token a row."""
    tokens = [0] * len(filters)
    for num_candidates, rows in _group_rows(filters, scaled.shape[-1]).items():
        group = _Rows(
            scaled[rows],
            [filters[row] for row in rows],
            torch.tensor(
                [uniforms[row] for row in rows], dtype=torch.float64, device=scaled.device
            ),
        )
        drawn = group.draw_from_all() if num_candidates is None else group.draw(num_candidates)
        for row, token in zip(rows, drawn, strict=True):
            tokens[row] = token
    return tokens


def _group_rows(filters: list[Filter], vocab_size: int) -> dict[int | None, list[int]]:
    """Group rows by how many candidates their own filter asks for; None: all, unsorted."""
    groups: dict[int | None, list[int]] = {}
    for row, kept in enumerate(filters):
        if 0 < kept.top_k < vocab_size:
            enough = (size for size in _CANDIDATES if kept.top_k < size < vocab_size)
            key: int | None = next(enough, vocab_size)
        elif kept.top_p < 1:
            key = min(_CANDIDATES[-1], vocab_size)
        else:
            key = None
        groups.setdefault(key, []).append(row)
    return groups


class _Rows:
    """Rows that are drawn in the same way."""

    def __init__(self, scaled: torch.Tensor, filters: list[Filter], uniforms: torch.Tensor) -> None:
        self._scaled = scaled  # [rows, vocab]
        self._filters = filters
        self._uniforms = uniforms  # [rows] float64
        self._max = scaled.amax(-1, keepdim=True)  # [rows, 1]

    def draw_from_all(self) -> list[int]:
        """Search the whole vocabulary by token id: first the chunk, then the token."""
        weights = (self._scaled - self._max).exp_()  # the most likely token weighs 1
        min_p = self._column([kept.min_p for kept in self._filters])
        weights = weights.masked_fill_(weights < min_p, 0)
        pad = -weights.shape[-1] % _CHUNK
        chunks = torch.nn.functional.pad(weights, (0, pad)).view(len(weights), -1, _CHUNK)
        ends = chunks.sum(-1, dtype=torch.float64).cumsum(-1)  # [rows, chunks]
        target = self._uniforms[:, None] * ends[:, -1:]
        chunk = _first_beyond(ends, target, ends[:, -1:])  # [rows, 1]
        within = chunks.gather(1, chunk[..., None].expand(-1, -1, _CHUNK)).squeeze(1)
        before = torch.where(chunk > 0, ends.gather(1, (chunk - 1).clamp(min=0)), 0)
        within_ends = within.cumsum(-1, dtype=torch.float64)
        offset = _first_beyond(within_ends, target - before, within_ends[:, -1:])
        return (chunk * _CHUNK + offset).squeeze(-1).tolist()

    def draw(self, num_candidates: int) -> list[int]:
        """Search the kept tokens, most likely first, equal ones by id.

        When the kept ones may not all be among the candidates, the row is sorted whole; both ways
        agree to the bit.
        """
        values, token_ids = self._most_likely(num_candidates)
        weights = (values - self._max).exp_().to(torch.float64)  # [rows, candidates], falling
        num_kept = self._count_kept(weights)  # [rows, 1]
        ends = weights.cumsum(-1)
        total = ends.gather(1, num_kept - 1)
        index = _first_beyond(ends, self._uniforms[:, None] * total, total)
        drawn: list[int] = token_ids.gather(1, index).squeeze(-1).tolist()
        if num_candidates < self._scaled.shape[-1]:
            is_complete = values.gather(1, num_kept - 1) > values[:, -1:]  # no equal one outside
            unsure = (~is_complete).squeeze(-1).nonzero().squeeze(-1).tolist()
            if unsure:
                rest = _Rows(
                    self._scaled[unsure],
                    [self._filters[row] for row in unsure],
                    self._uniforms[unsure],
                )
                for row, token in zip(unsure, rest.draw(self._scaled.shape[-1]), strict=True):
                    drawn[row] = token
        return drawn

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
        limits = [kept.top_k or vocab_size for kept in self._filters]
        limit = torch.tensor(limits, device=weights.device)[:, None]
        top_k = limit.clamp(max=weights.shape[-1])
        ends = weights.cumsum(-1)
        whole = (self._scaled - self._max).exp_().sum(-1, dtype=torch.float64, keepdim=True)
        mass = torch.where(limit < vocab_size, ends.gather(1, top_k - 1), whole)
        top_p = self._column([kept.top_p for kept in self._filters])
        # A token stays while those before it do not reach top_p; with 1 all stay, rounding or not.
        in_top_p = ((ends - weights) < top_p * mass) | (top_p >= 1)
        in_min_p = weights >= self._column([kept.min_p for kept in self._filters])
        num_kept = torch.minimum(in_top_p.sum(-1, keepdim=True), in_min_p.sum(-1, keepdim=True))
        return torch.minimum(num_kept, top_k).clamp(min=1)

    def _column(self, numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=self._scaled.device)[:, None]


def _first_beyond(ends: torch.Tensor, target: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return per row the first index whose cumulated weight exceeds the target.

    The target is kept below ``last``, the end of the draw: rounding never finds a weightless index.
    """
    below_last = torch.minimum(target, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(ends, below_last, right=True)
