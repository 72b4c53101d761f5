"""Comparing what a sequence was told with what it had to be told, and tallying the verdicts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from headrace_worker.engine.messages import SequenceFinish
from support.matrix_play import Heard
from support.matrix_workload import Ask
from support.textbook_sampler import NEAR, adjust, distance

LOGIT_TOLERANCE = 1e-4  # between float32 in the engine and in transformers


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request has to be told from its first token on."""

    ask: Ask
    token_ids: tuple[int, ...]
    rows: torch.Tensor  # [prompt + answer, vocab] float32, transformers' logits behind each token
    finish: SequenceFinish

    @property
    def answer_rows(self) -> torch.Tensor:
        """The rows that predict each id of the answer, ``[len(token_ids), vocab]``."""
        return self.rows[len(self.ask.prompt) - 1 : -1]


@dataclass(slots=True)
class Tally:
    """What comparisons found; tallies add up."""

    num_sequences: int = 0
    num_ids: int = 0  # compared
    num_identical: int = 0
    max_logit_difference: float = 0.0
    near_ties: list[str] = field(default_factory=list)  # mismatches that the reference excuses
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Take in what another comparison found."""
        self.num_sequences += other.num_sequences
        self.num_ids += other.num_ids
        self.num_identical += other.num_identical
        self.max_logit_difference = max(self.max_logit_difference, other.max_logit_difference)
        self.near_ties += other.near_ties
        self.failures += other.failures

    def __str__(self) -> str:
        return (
            f"sequences {self.num_sequences}, ids compared {self.num_ids}, identical"
            f" {self.num_identical}, near-ties {len(self.near_ties)}, largest difference"
            f" {self.max_logit_difference:.1e}, failures {len(self.failures)}"
        )


def total(tallies: Iterable[Tally]) -> Tally:
    """Return the sum."""
    found = Tally()
    for tally in tallies:
        found.add(tally)
    return found


def compare(label: str, heard: Heard, wanted: Wanted) -> Tally:
    """Compare ids and logits, place by place, up to the first mismatch of the ids.

    Behind a mismatch the two are different texts, so nothing there can be compared.
    """
    tally = Tally(num_sequences=1)
    _compare_scores(label, heard, wanted, tally)
    start = heard.arrival.num_known
    for place, token_id in enumerate(heard.token_ids, start):
        if place == len(wanted.token_ids):
            tally.failures.append(f"{label}: goes on after its {place} tokens")
            return tally
        tally.num_ids += 1
        _compare_logits(f"{label}, token {place}", heard.rows[place - start], wanted, place, tally)
        if token_id != wanted.token_ids[place]:
            _judge(f"{label}, token {place}", token_id, wanted, place, tally)
            return tally
        tally.num_identical += 1
    if not heard.was_dropped:
        _compare_ends(label, heard, wanted, tally)
    return tally


def compare_bits(label: str, heard: Heard, alone: Heard) -> Tally:
    """Compare ids and logits with those of another run of the same model, to the bit."""
    pairs = list(zip(heard.rows, alone.rows, strict=False))
    differences = [(row - other).abs().max().item() for row, other in pairs]
    tally = Tally(1, len(pairs), sum(torch.equal(*pair) for pair in pairs), max(differences))
    told, wanted = ((one.token_ids, one.finish) for one in (heard, alone))
    if told != wanted or tally.num_identical < tally.num_ids:
        tally.failures.append(f"{label}: {told} for {wanted}, or logits with other bits")
    return tally


def _compare_logits(
    label: str, row: torch.Tensor, wanted: Wanted, place: int, tally: Tally
) -> None:
    difference = (row - wanted.answer_rows[place]).abs().max().item()
    _limit(f"{label}: a logit", difference, tally)


def _compare_scores(label: str, heard: Heard, wanted: Wanted, tally: Tally) -> None:
    """Every prompt token but the first has its log-probability, if it was asked for."""
    prompt = wanted.ask.prompt
    if wanted.ask.sampling.prompt_logprobs is None or (heard.was_dropped and not heard.scores):
        return
    told = [score.token_id for score in heard.scores]
    if told != list(prompt[1 : 1 + len(told)] if heard.was_dropped else prompt[1:]):
        tally.failures.append(f"{label}: scores of {told}, not of the prompt")
        return
    logprobs = wanted.rows[: len(told)].log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(told)[:, None])[:, 0]
    difference = (torch.tensor([score.logprob for score in heard.scores]) - own).abs().max()
    _limit(f"{label}: a prompt token's log-probability", difference.item(), tally)


def _limit(what: str, difference: float, tally: Tally) -> None:
    tally.max_logit_difference = max(tally.max_logit_difference, difference)
    if not difference <= LOGIT_TOLERANCE:
        tally.failures.append(f"{what} is {difference:.1e} from that of transformers")


def _judge(label: str, token_id: int, wanted: Wanted, place: int, tally: Tally) -> None:
    """Accept a mismatch only where the reference itself could have gone either way."""
    ask, before = wanted.ask, wanted.token_ids[:place]
    row = adjust(wanted.answer_rows[place].numpy(), ask.sampling, ask.prompt, before)
    position, told = len(ask.prompt) + place, (token_id, wanted.token_ids[place])
    gap = max(distance(row, ask.sampling, position, one) for one in told)
    verdict = f"{label}: {told[0]} for {told[1]}, with {gap:.1e} between them"
    (tally.near_ties if gap < NEAR else tally.failures).append(verdict)


def _compare_ends(label: str, heard: Heard, wanted: Wanted, tally: Tally) -> None:
    num_told = heard.arrival.num_known + len(heard.token_ids)
    if num_told != len(wanted.token_ids) or heard.finish is not wanted.finish:
        tally.failures.append(
            f"{label}: ends with {heard.finish} after {num_told} tokens,"
            f" not with {wanted.finish} after {len(wanted.token_ids)}"
        )
