"""A draw depends on its own row, seed and position alone, and follows the distribution."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace_worker.engine.draw import Draw, _sum_rows, draw_tokens, uniform

ALL = Draw(0)  # prototypes: the number is filled in for each draw


def draw_rows(logits: torch.Tensor, kept: list[Draw], numbers: list[float]) -> list[int]:
    """Draw every row with its own number."""
    pairs = zip(kept, numbers, strict=True)
    tokens = draw_tokens(logits, {i: replace(k, number=n) for i, (k, n) in enumerate(pairs)})
    return [tokens[row] for row in range(len(logits))]


def draw_many(logits: list[float], kept: Draw, count: int = 4000) -> list[float]:
    """Return how often each token comes out of that many draws."""
    rows = torch.tensor([logits]).expand(count, -1).contiguous()
    drawn = draw_rows(rows, [kept] * count, [uniform(seed, 3) for seed in range(count)])
    return [drawn.count(token) / count for token in range(len(logits))]


def bf16_like(num_rows: int, vocab: int) -> torch.Tensor:
    """Random logits with many equal values, as a bf16 model makes them."""
    generator = torch.Generator().manual_seed(7)
    return (torch.randn(num_rows, vocab, generator=generator) * 2).to(torch.bfloat16).float()


def test_the_number_behind_a_draw_never_changes() -> None:
    """These are golden values: another release must continue a stream with the same tokens."""
    assert uniform(0, 0) == 0.9308462918055221
    assert uniform(2**64 - 1, 123_456) == 0.8650623385863153


def test_neighbouring_seeds_and_positions_are_unrelated() -> None:
    """Numbers for seed + i, and for position + i, are spread evenly over [0, 1)."""
    for numbers in ([uniform(i, 5) for i in range(4000)], [uniform(5, i) for i in range(4000)]):
        assert all(0 <= number < 1 for number in numbers)
        tenths = [sum(int(number * 10) == tenth for number in numbers) for tenth in range(10)]
        assert min(tenths) > 330
        assert max(tenths) < 470


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (ALL, [0.5, 0.25, 0.15, 0.1]),
        (Draw(0, 1.0, 2, 1.0, 0.0), [2 / 3, 1 / 3, 0, 0]),
        (Draw(0, 1.0, 0, 0.76, 0.0), [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        (Draw(0, 1.0, 0, 0.5, 0.0), [1, 0, 0, 0]),
        (Draw(0, 1.0, 0, 1.0, 0.4), [2 / 3, 1 / 3, 0, 0]),
        (Draw(0, 1.0, 3, 0.6, 0.0), [2 / 3, 1 / 3, 0, 0]),
        (Draw(0, 1.0, 3, 1.0, 0.4), [2 / 3, 1 / 3, 0, 0]),
    ],
)
def test_tokens_come_out_as_often_as_the_filtered_distribution_says(
    kept: Draw, expected: list[float]
) -> None:
    """Top-k first, top-p of what is left, min-p of the most likely; then the rest is normalized."""
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log().tolist()
    assert draw_many(logits, kept) == pytest.approx(expected, abs=0.03)
    assert [share > 0 for share in draw_many(logits, kept)] == [share > 0 for share in expected]


@pytest.mark.parametrize("kept", [ALL, Draw(0, 1.0, 0, 0.9, 0.0), Draw(0, 1.0, 50, 1.0, 0.0)])
def test_a_row_draws_the_same_token_in_any_company(kept: Draw) -> None:
    """Alone, in a crowd, in another order and beside other filters: the token is the same."""
    logits = bf16_like(12, 3000)
    uniforms = [uniform(seed, 9) for seed in range(12)]
    alone = [draw_rows(logits[i : i + 1], [kept], uniforms[i : i + 1])[0] for i in range(12)]
    others = [ALL, Draw(0, 1.0, 5, 0.5, 0.1), Draw(0, 1.0, 500, 1.0, 0.0)]
    mixed = [kept if i % 2 else others[i % 3] for i in range(12)]
    order = list(reversed(range(12)))
    backwards = draw_rows(logits[order], [mixed[i] for i in order], [uniforms[i] for i in order])[
        ::-1
    ]
    assert draw_rows(logits, [kept] * 12, uniforms) == alone
    assert [backwards[i] for i in range(1, 12, 2)] == alone[1::2]


@pytest.mark.parametrize(
    "kept",
    [
        Draw(0, 1.0, 0, 0.3, 0.0),
        Draw(0, 1.0, 0, 0.999, 0.0),
        Draw(0, 1.0, 40, 0.9, 0.0),
        Draw(0, 1.0, 900, 1, 0.02),
    ],
)
def test_looking_at_candidates_only_gives_what_a_full_sort_gives(kept: Draw) -> None:
    """The shortcut for large vocabularies agrees with the definition, equal logits included."""
    logits = bf16_like(40, 5000)
    uniforms = [uniform(seed, 1) for seed in range(40)]
    expected = [by_definition(row, kept, u) for row, u in zip(logits, uniforms, strict=True)]
    assert draw_rows(logits, [kept] * 40, uniforms) == expected


def test_equal_logits_at_the_limit_of_top_k_are_kept_by_id() -> None:
    """With five equal tokens and top_k 2, the two lowest ids are in, and no third."""
    assert [share > 0 for share in draw_many([1.0] * 5, Draw(0, 1.0, 2, 1.0, 0.0), 200)] == [
        *(True, True),
        *(False, False, False),
    ]


def test_rows_that_nobody_asks_for_are_not_drawn() -> None:
    """Greedy neighbours cost nothing."""
    assert set(draw_tokens(torch.zeros(4, 9), {1: Draw(0.5), 3: Draw(0.5)})) == {1, 3}


def test_temperature_divides_the_logits() -> None:
    """Odds of 2 : 1 at temperature 1 are 4 : 1 at a half."""
    logits = torch.tensor([2.0, 1.0]).log().tolist()
    assert draw_many(logits, Draw(0, 0.5)) == pytest.approx([0.8, 0.2], abs=0.03)


def test_a_flat_distribution_beyond_the_candidates_is_drawn_whole() -> None:
    """When top-p keeps more tokens than are looked at first, none is cut off."""
    logits = torch.zeros(1, 4000).expand(300, -1)
    uniforms = [uniform(seed, 0) for seed in range(300)]
    drawn = draw_rows(logits, [Draw(0, 1.0, 0, 0.99, 0.0)] * 300, uniforms)
    assert max(drawn) > 3500


@pytest.mark.parametrize("kept", [ALL, Draw(0, 1.0, 0, 0.9, 0.0), Draw(0, 1.0, 2, 1.0, 0.0)])
def test_a_token_without_probability_is_never_drawn(kept: Draw) -> None:
    """The largest possible number still finds a token of positive weight."""
    logits = torch.tensor([[float("-inf"), 0.0, 1.0, float("-inf")]])
    for number in (0.0, 0.5, 1 - 2.0**-53):
        assert draw_rows(logits, [kept], [number])[0] in (1, 2)


def by_definition(row: torch.Tensor, kept: Draw, number: float) -> int:
    """Sort everything, filter one by one, walk the cumulated weights: slow, and easy to believe."""
    ranked = sorted(range(len(row)), key=lambda token: (-row[token].item(), token))
    values = row[ranked]
    weights = (values - values[0]).exp().double()
    if kept.top_k:
        weights, ranked = weights[: kept.top_k], ranked[: kept.top_k]
    before = weights.cumsum(0) - weights
    keep = (before < kept.top_p * weights.sum()) & (weights >= kept.min_p)
    weights = weights[: int(keep.sum())]
    target = number * weights.sum().item()
    return ranked[int((weights.cumsum(0) <= target).sum())]


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_the_weight_of_a_row_has_the_same_bits_alone_and_beside_others(num_threads: int) -> None:
    """Else a top-p could end a token earlier alone than in a batch (B16)."""
    weights = bf16_like(7, 50_257).exp()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = _sum_rows(weights)
        alone = torch.cat([_sum_rows(weights[[row]]) for row in range(7)])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, alone)
    torch.testing.assert_close(together, weights.double().sum(-1, keepdim=True))
