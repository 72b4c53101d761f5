"""A model cut over several ranks computes what it computes on one, whatever its family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_worker.attention.reference import ReferenceBackend
from headrace_worker.model import load_model
from headrace_worker.model.families import FAMILIES
from headrace_worker.model.ranks import ALONE, Ranks
from support.native import decoder_of
from support.packed import PackedRun
from support.ranks import on_ranks
from support.tiny_gguf import write_tiny_gguf
from support.tiny_models import build_tiny_model, make_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [30, 2, 200, 41, 17], [318, 319, 160]]
BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}


def logits_of(path: Path, ranks: Ranks) -> torch.Tensor:
    """Prefill all prompts in chunks; return float32 logits ``[num_tokens, vocab_size]``."""
    model = load_model(path, dtype=torch.float32, device=CPU, ranks=ranks).packed()
    return torch.cat(PackedRun(model, ReferenceBackend(), PROMPTS).prefill(chunk=4))


def assert_alike(path: Path, *sizes: int) -> None:
    """Compare the logits of so many ranks with those of one, to the rounding of sums."""
    alone = logits_of(path, ALONE)
    for size in sizes:
        first, *_ = on_ranks(size, lambda ranks: logits_of(path, ranks))
        torch.testing.assert_close(first, alone, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_logits_of_one_rank(tmp_path: Path, family: str) -> None:
    """Two ranks have a KV head each; of four, two hold the same one."""
    assert_alike(make_tiny_model(tmp_path, family), 2, 4)


def test_biases_are_added_once_and_words_need_not_divide(tmp_path: Path) -> None:
    """All projections have a bias, the head is no embedding, and 323 words are padded for two."""
    options = {"vocab_size": 323, "tie_word_embeddings": False, **BIASES}
    assert_alike(make_tiny_model(tmp_path, **options), 2)


def test_a_rank_beyond_the_words_holds_nothing_but_padding(tmp_path: Path) -> None:
    """Nine words on four ranks are three each, and none is left for the last."""
    path = make_tiny_model(tmp_path, vocab_size=9, eos_token_id=2)

    def embedding(ranks: Ranks) -> torch.Tensor:
        model = load_model(path, dtype=torch.float32, device=CPU, ranks=ranks)
        return decoder_of(model).embedding

    parts = on_ranks(4, embedding)
    assert [len(part) for part in parts] == [3, 3, 3, 3]
    assert torch.equal(torch.cat(parts)[:9], embedding(ALONE))
    assert not parts[3].any()


def test_a_gguf_file_is_cut_as_well(tmp_path: Path) -> None:
    """Its tensors are decoded and put in order first."""
    assert_alike(write_tiny_gguf(tmp_path / "tiny.gguf", build_tiny_model()), 2)


def test_a_row_has_the_same_bits_in_any_company_on_three_ranks() -> None:
    """Parts are added in the order of ranks, so a row's sum depends on nothing but the row."""
    rows = torch.randn(3, 50, 64, generator=torch.Generator().manual_seed(0))

    def sums(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
        mine = rows[ranks.rank]
        return ranks.sum(mine.clone()), torch.cat([ranks.sum(x.clone()) for x in mine.split(1)])

    parts = [part for both in on_ranks(3, sums) for part in both]
    assert all(torch.equal(part, parts[0]) for part in parts)
    torch.testing.assert_close(parts[0], rows.sum(0))
