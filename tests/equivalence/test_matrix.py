"""Every model family under every option: no schedule changes a token, and all are the model's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from support.matrix import ALONE, COLUMNS, GENERATE, Matrix, columns_of
from support.matrix_families import FAMILIES
from support.matrix_workload import SMALL

SEED = 0
CHANCE = "everything by chance"
WHOLE_ROWS = ("llama",)  # families that meet every option here; in the report all do
SHARE = 8  # each other family meets one option of so many, and each option a family of so many


def options_of(place: int, family: str) -> list[str]:
    """Return the options that a family meets in this small version, in the matrix's order."""
    if family in WHOLE_ROWS:
        return list(columns_of(family))
    always = (ALONE, GENERATE, CHANCE)
    return [
        column
        for index, column in enumerate(columns_of(family))
        if column in always or index % SHARE == place % SHARE
    ]


CELLS = [
    (family, option)
    for place, family in enumerate(FAMILIES)
    for option in options_of(place, family)
]


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Matrix]:
    """Each family's models, baseline included, made once for all its options."""
    torch.set_num_threads(1)
    return cache(
        lambda family: Matrix(family, tmp_path_factory.mktemp("family"), seed=SEED, size=SMALL)
    )


@pytest.mark.parametrize(("family", "option"), CELLS)
def test_every_token_is_the_one_that_the_model_gives_alone(
    matrices: Callable[[str], Matrix], family: str, option: str
) -> None:
    """Ids are those of the baseline or excused by a near-tie; logits are those of transformers."""
    tally = matrices(family).run(option)
    assert tally.failures == []
    assert tally.num_identical + len(tally.near_ties) == tally.num_ids > 0


def test_every_option_meets_several_families() -> None:
    """The small version leaves no option to one family alone."""
    assert all(sum(option == column for _, option in CELLS) > 1 for column in COLUMNS)
