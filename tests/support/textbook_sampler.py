"""Sampling as a textbook has it, in float64: what the engine's fast sampler has to agree with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_worker.engine.draw import uniform
from headrace_worker.engine.messages import SamplingSpec
from support.matrix_grammar import allowed_tokens

NEAR = 1e-3  # logits, or shares of the whole, closer than this may come out either way
Row = NDArray[np.float64]  # [vocab]


def adjust(raw: Any, spec: SamplingSpec, prompt: tuple[int, ...], output: tuple[int, ...]) -> Row:
    """Return a row of logits after bias, penalties and all that masks tokens."""
    row = np.array(raw, dtype=np.float64)
    for token_id, bias in spec.logit_bias:
        row[token_id] += bias
    for token_id in set(prompt + output):
        value = row[token_id]
        penalty = spec.repetition_penalty
        row[token_id] = value / penalty if value > 0 else value * penalty
    for token_id, count in Counter(output).items():
        row[token_id] -= spec.presence_penalty + spec.frequency_penalty * count
    if len(output) < spec.min_tokens:
        row[list(spec.stop_token_ids)] = -np.inf
    for *beginning, last in spec.bad_words:
        if beginning == list(output[len(output) - len(beginning) :]):
            row[last] = -np.inf
    if spec.grammar is not None:
        row[~allowed_tokens(spec.grammar, output)[: len(row)]] = -np.inf
    return row


def choose(row: Row, spec: SamplingSpec, position: int) -> int:
    """Return the token at a place of the sequence; ``position`` tokens stand before it."""
    if spec.temperature == 0:
        return int(row.argmax())
    ranking = _Ranking(row, spec)
    return ranking.find(uniform(spec.seed, position), ranking.count_kept())


def distance(row: Row, spec: SamplingSpec, position: int, token_id: int) -> float:
    """Return how far this row is from choosing ``token_id``; rounding bridges less than NEAR.

    Greedy: the logits between it and the top. Drawn: from the number that decides, in [0, 1), to
    the token's share; or, where less, the logits between it and a token that the number does find,
    because near ones change ranks. A filter's limit may be passed by as much as NEAR, too.
    """
    if spec.temperature == 0:
        return float(row.max() - row[token_id])
    ranking = _Ranking(row, spec)
    number = uniform(spec.seed, position)
    distances = [1.0]
    for num_kept in {ranking.count_kept(slack) for slack in (-NEAR, 0.0, NEAR)}:
        gap = abs(row[token_id] - row[ranking.find(number, num_kept)])
        distances += [float(gap), ranking.distance(number, num_kept, token_id)]
    return min(distances)


@dataclass(slots=True)
class _Ranking:
    """The tokens in the order in which their shares lie: by likelihood, or by id if unfiltered."""

    spec: SamplingSpec
    order: NDArray[np.int64]  # token ids
    weights: Row  # of the tokens in that order; the most likely one weighs 1

    def __init__(self, row: Row, spec: SamplingSpec) -> None:
        self.spec = spec
        weights = np.exp((row - row.max()) / spec.temperature)
        if self._is_ranked(len(row)):
            self.order = np.argsort(-row, kind="stable")
        else:
            self.order = np.arange(len(row))
            weights[weights < spec.min_p] = 0
        self.weights = weights[self.order]

    def count_kept(self, slack: float = 0.0) -> int:
        """Return how many leading tokens the filters keep, their limits moved by the slack."""
        size = len(self.weights)
        if not self._is_ranked(size):
            return size
        top_k = min(self.spec.top_k or size, size)
        ends = self.weights.cumsum()
        before = (ends - self.weights) / ends[top_k - 1]
        in_top_p = int((before < self.spec.top_p + slack).sum()) if self.spec.top_p < 1 else size
        in_min_p = int((self.weights >= self.spec.min_p * (1 + slack)).sum())
        return max(1, min(top_k, in_top_p, in_min_p))

    def find(self, number: float, num_kept: int) -> int:
        """Return the token whose share of the kept ones holds the number in [0, 1)."""
        ends = self.weights[:num_kept].cumsum()
        return int(self.order[np.searchsorted(ends, number * ends[-1], side="right")])

    def distance(self, number: float, num_kept: int, token_id: int) -> float:
        """Return how far the number is from the token's share; 1, that is all, if it has none."""
        place = int(np.flatnonzero(self.order == token_id)[0])
        if place >= num_kept or self.weights[place] == 0:
            return 1.0
        ends = self.weights[:num_kept].cumsum()
        end, start = ends[place] / ends[-1], (ends[place] - self.weights[place]) / ends[-1]
        return float(max(0.0, start - number, number - end))

    def _is_ranked(self, vocab_size: int) -> bool:
        return 0 < self.spec.top_k < vocab_size or self.spec.top_p < 1
