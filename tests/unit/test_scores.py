"""Scores of tokens: the model's log-probabilities, the same in any company."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from headrace_worker.engine.messages import TokenScore
from headrace_worker.engine.scores import LOGPROB_FLOOR, score_tokens

LOGITS = torch.tensor([[1.0, 4.0, 3.0, 2.0, 0.0]])


@pytest.fixture(params=[1, 4], ids=["one-thread", "four-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """With that many threads, as a reduction may be split among them."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def score(logits: torch.Tensor, token_ids: list[int], num_best: list[int]) -> list[TokenScore]:
    """Score all rows at once."""
    return list(score_tokens(logits, token_ids, num_best))


def test_a_score_is_the_logarithm_of_the_softmax() -> None:
    """The token's own, and the k most likely ones, best first."""
    expected = LOGITS[0].log_softmax(-1).tolist()
    (told,) = score(LOGITS, [3], [2])
    assert told == TokenScore(3, expected[3], ((1, expected[1]), (2, expected[2])))


def test_equal_logits_stand_by_token_id_also_where_the_list_ends() -> None:
    """A list of k is the head of any longer one, though many are equal."""
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0, 2.0]])
    for count in range(8):
        (told,) = score(logits, [0], [count])
        assert [token_id for token_id, _ in told.top_logprobs] == [1, 3, 6, 0, 2, 4, 5][:count]


@pytest.mark.parametrize("vocab_size", [300, 5120, 50257])
@pytest.mark.parametrize("count", [1, 5, 20])
def test_the_best_are_those_of_a_full_sort(vocab_size: int, count: int) -> None:
    """However few chunks of the vocabulary are searched, and with many equal values."""
    generator = torch.Generator().manual_seed(count)
    logits = torch.randn(6, vocab_size, generator=generator).mul_(2).bfloat16().float()
    logits[0] = 0.0
    logits[1, -3:] = 9.0  # beyond the last whole chunk
    logits[2, 100:] = -math.inf
    expected = logits.sort(stable=True, descending=True).indices[:, :count].tolist()
    told = score(logits, [0] * 6, [count] * 6)
    assert [[token_id for token_id, _ in row.top_logprobs] for row in told] == expected


def test_rows_that_ask_for_more_do_not_change_those_that_ask_for_less() -> None:
    """Each gets as many as it wants, never more than there are tokens (B23)."""
    rows = LOGITS.repeat(3, 1)
    together = score(rows, [0, 1, 2], [0, 10**6, 2])
    assert [len(told.top_logprobs) for told in together] == [0, 5, 2]
    alone = [score(LOGITS, [row], [count])[0] for row, count in enumerate((0, 10**6, 2))]
    assert together == alone


def test_what_json_cannot_say_is_the_floor() -> None:
    """Minus infinity, and a token that is padding beyond the vocabulary (B24, B30)."""
    logits = torch.tensor([[0.0, -math.inf], [0.0, 0.0]])
    impossible, padding = score(logits, [1, 7], [2, 0])
    assert impossible == TokenScore(1, LOGPROB_FLOOR, ((0, 0.0), (1, LOGPROB_FLOOR)))
    assert padding == TokenScore(7, LOGPROB_FLOOR)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("vocab_size", [320, 49152, 50257])
def test_scores_have_the_same_bits_alone_and_in_a_crowd(vocab_size: int) -> None:
    """Neither the rows beside it nor their number changes what a row gets (B14)."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(9, vocab_size, generator=generator).mul_(4).bfloat16().float()
    token_ids = list(range(9))
    together = score(logits, token_ids, [5] * 9)
    assert together == [score(logits[[row]], [row], [5])[0] for row in token_ids]
    assert together[2:5] == score(logits[2:5], token_ids[2:5], [5] * 3)
