"""A whole forward in Triton, attention and rows, generates what transformers generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_worker.attention.triton import TritonBackend
from headrace_worker.model import load_model
from headrace_worker.model.decoder import Decoder
from headrace_worker.model.triton_row_ops import TritonRowOps
from support.packed import PackedRun, greedy_by_transformers
from support.tiny_models import build_tiny_model

pytest.importorskip("triton", reason="Triton is not installed on this machine")

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "normed heads in three groups": (
        "qwen3",
        {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48},
    ),
    "centred and capped, with a window": ("gemma2", {"sliding_window": 10}),
    "a part that does not turn": (
        "phi3",
        {"tie_word_embeddings": False, "partial_rotary_factor": 0.75},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens(name: str, tmp_path: Path) -> None:
    """Chunks and decodes in one batch, through scattered blocks, two layers deep."""
    torch.set_num_threads(1)
    family, options = VARIANTS[name]
    source = build_tiny_model(family, **options)
    source.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(model.decoder, Decoder)
    for part in (model.decoder, *model.decoder.layers):
        part.row_ops = TritonRowOps()
    prompts = [[*range(7, 21)], [5, 6, 7]]
    run = PackedRun(model, TritonBackend(), prompts, room=3)
    assert run.generate(3, chunk=11) == [greedy_by_transformers(source, p, 3) for p in prompts]
