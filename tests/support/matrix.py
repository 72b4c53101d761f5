"""The metamorphic matrix: model family × option, every token compared with the baseline's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from support.matrix_compare import Tally, Wanted, compare, compare_bits, total
from support.matrix_families import make_twin
from support.matrix_options import BY_CHANCE, OPTIONS, alone, in_company
from support.matrix_play import Heard, Play, Stage
from support.matrix_workload import Ask, Size, make_workload
from support.textbook_sampler import adjust, choose

ALONE, GENERATE = "alone", "transformers.generate"
BITS = {f"{dtype}, bit for bit": dtype for dtype in ("float32", "bfloat16")}
COLUMNS = (ALONE, GENERATE, *BITS, *OPTIONS)


def columns_of(family: str) -> tuple[str, ...]:
    """Return the options that a family has: bits are promised for this project's own decoder."""
    return tuple(c for c in COLUMNS if c not in BITS or not family.startswith("external"))


class Matrix:
    """One family under one workload: the baseline, and everything that is compared with it."""

    def __init__(self, family: str, folder: Path, *, seed: int, size: Size) -> None:
        self._name = f"{family}, workload {seed}"
        self._folder = folder
        self._twin = make_twin(family, folder)
        self._stage = Stage(folder, make_workload(seed, size))
        self._baseline, _ = self._stage.perform(alone(self._stage.asks), [])
        self._wanted = list(map(self._want, self._stage.asks, self._baseline))

    def run(self, column: str, *, times: int = 1) -> Tally:
        """Compare one option with the baseline, or the baseline with transformers.

        Options that leave something to chance are run ``times`` times, and differ each time.
        """
        if column == ALONE:
            return self._compare(column, self._baseline, self._drawn)
        if column == GENERATE:
            greedy = [heard for heard in self._baseline if self._ask(heard).kind == "greedy"]
            return self._compare(column, greedy, self._generated)
        if column in BITS:
            return self._compare_bits(column, BITS[column])
        answers = [wanted.token_ids for wanted in self._wanted]
        rng = random.Random(f"{self._name} {column}")
        num_runs = times if column in BY_CHANCE else 1
        plays = [OPTIONS[column](self._stage.asks, answers, rng) for _ in range(num_runs)]
        return total(
            self._perform(f"{column} {number}", play, answers)
            for number, play in enumerate(chain.from_iterable(plays))
        )

    def _perform(self, label: str, play: Play, answers: Sequence[Sequence[int]]) -> Tally:
        heard, events = self._stage.perform(play, answers)
        tally = self._compare(label, heard, lambda wanted: wanted)
        missing = [event.value for event in play.must - events]
        tally.failures += [f"{self._name}, {label}: {event} never came" for event in missing]
        return tally

    def _compare_bits(self, column: str, dtype: str) -> Tally:
        """Compare the model with itself: in company, every request gets the bits it has alone."""
        stage = Stage(self._folder, self._stage.asks, dtype=dtype)
        lone, _ = stage.perform(alone(stage.asks), [])
        heard: list[Heard] = []
        for play in in_company(stage.asks, random.Random(f"{self._name} {column}")):
            heard += stage.perform(play, [])[0]
        return total(
            compare_bits(f"{self._name}, {column}, request {ask}", one, lone[ask])
            for one in heard
            for ask in [one.arrival.ask]
        )

    def _compare(
        self, label: str, heard: Iterable[Heard], want: Callable[[Wanted], Wanted]
    ) -> Tally:
        return total(
            compare(
                f"{self._name}, {label}, {self._ask(one).kind} request {one.arrival.ask}",
                one,
                want(self._wanted[one.arrival.ask]),
            )
            for one in heard
        )

    def _ask(self, heard: Heard) -> Ask:
        return self._stage.asks[heard.arrival.ask]

    def _want(self, ask: Ask, heard: Heard) -> Wanted:
        """Return the baseline's answer, with transformers' logits along it."""
        answer = tuple(heard.token_ids)
        assert heard.finish is not None
        return Wanted(ask, answer, self._twin.rows(ask.prompt + answer), heard.finish)

    def _drawn(self, wanted: Wanted) -> Wanted:
        """Return what a textbook draws from transformers' logits at each place of the answer."""
        ask, ids = wanted.ask, wanted.token_ids
        choices = [
            choose(
                adjust(row.numpy(), ask.sampling, ask.prompt, ids[:place]),
                ask.sampling,
                len(ask.prompt) + place,
            )
            for place, row in enumerate(wanted.answer_rows)
        ]
        return replace(wanted, token_ids=tuple(choices))

    def _generated(self, wanted: Wanted) -> Wanted:
        ask = wanted.ask
        return replace(wanted, token_ids=self._twin.generate(ask.prompt, ask.sampling.max_tokens))
