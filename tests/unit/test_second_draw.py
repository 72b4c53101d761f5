"""Rows that are drawn a second time: where memory is short a few at once, and else none is kept."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import pytest
import torch

from headrace_worker.engine import draw, second_draw
from headrace_worker.engine.draw import Draw, draw_tokens
from headrace_worker.engine.messages import SampledToken, SequenceFailure
from headrace_worker.engine.sample_ahead import SampledAhead
from headrace_worker.engine.sampler import sample
from headrace_worker.engine.sequence import Sequence
from support.oracle import make_engine, request, run, solo

# So even that the first candidates never hold what top-p keeps: each such row is in doubt.
LOGITS = torch.randn(5, 2048, generator=torch.Generator().manual_seed(5)) / 10


def sequences(**sampling: float) -> list[Sequence]:
    """Return one for each row; the third is greedy."""
    wishes = {"temperature": 1.0, "top_p": 0.99, **sampling}
    return [
        Sequence(request(row, [1, 2], **(wishes if row != 2 else {})), arrival=row)
        for row in range(len(LOGITS))
    ]


class SmallDevice:
    """Has memory to draw so many rows at once."""

    def __init__(self, num_rows: int) -> None:
        self.drawn: list[int] = []  # rows of the draws that found memory
        self._num_rows = num_rows

    def draw(self, logits: torch.Tensor, draws: Mapping[int, Draw]) -> dict[int, int]:
        if len(draws) > self._num_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        self.drawn.append(len(draws))
        return draw_tokens(logits, draws)


@pytest.mark.parametrize(("num_rows", "drawn"), [(4, [4]), (3, [2, 2]), (1, [1, 1, 1, 1])])
def test_a_second_draw_without_memory_is_made_in_parts(
    num_rows: int, drawn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are those of a device with memory, and the engine goes on."""
    device = SmallDevice(num_rows)
    monkeypatch.setattr(second_draw, "draw_tokens", device.draw)
    seqs = sequences()
    assert SampledAhead(LOGITS, seqs).collect() == sample(LOGITS, seqs)
    assert device.drawn == drawn


def test_a_draw_that_finds_no_memory_alone_fails_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The greedy one beside it, which nobody draws for, has its token."""
    monkeypatch.setattr(second_draw, "draw_tokens", SmallDevice(0).draw)
    ahead = SampledAhead(LOGITS, sequences())
    results = ahead.collect()
    assert results[2] == SampledToken(2, int(LOGITS[2].argmax()))
    failures = [result for result in results if isinstance(result, SequenceFailure)]
    assert [failure.seq_id for failure in failures] == [0, 1, 3, 4]
    assert all("out of memory" in failure.message for failure in failures)
    assert ahead.corrected == frozenset()


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_p": 1.0, "min_p": 0.1}])
def test_logits_are_not_kept_for_rows_that_cannot_be_in_doubt(sampling: dict[str, float]) -> None:
    """A vocabulary for each row is much memory while the next step runs."""
    logits = LOGITS.clone()
    kept = weakref.ref(logits)
    ahead = SampledAhead(logits, sequences(**sampling))
    del logits
    assert kept() is None
    assert len(ahead.collect()) == 5


def test_logits_of_rows_in_doubt_are_gone_once_they_are_collected() -> None:
    """The runner keeps the last step for the next one to read from, however long that takes."""
    logits = LOGITS.clone()
    kept = weakref.ref(logits)
    ahead = SampledAhead(logits, sequences())
    del logits
    assert kept() is not None
    ahead.collect()
    assert kept() is None


def test_an_engine_outlives_a_draw_that_finds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that had read the token counts for nothing; the neighbour gets its answer."""
    monkeypatch.setattr(draw, "_TOP_P_CANDIDATES", 2)
    monkeypatch.setattr(second_draw, "draw_tokens", SmallDevice(0).draw)
    engine = make_engine(one_ahead=True)
    unlucky = request(1, [1, 7], max_tokens=20, temperature=3.0, top_p=0.99)
    other = request(2, [2, 5], max_tokens=20)
    answers = run(engine, unlucky, other)
    assert answers.tokens[2] == solo(other)
    assert set(answers.failed) == {1}
    assert "out of memory" in answers.failed[1].message
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
