"""The models of the matrix: tiny random ones of every family, and their twins in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from support.packed import greedy_by_transformers
from support.tiny_models import build_tiny_model, build_tiny_tokenizer

WINDOW = 20  # tokens, less than most prompts of the matrix


@dataclass(frozen=True, slots=True)
class Family:
    """How to make one model."""

    model_type: str  # of transformers
    options: Mapping[str, Any] = field(default_factory=dict)  # of its configuration
    attention: str = "sdpa"  # how transformers is to compute attention for the comparison


FAMILIES: dict[str, Family] = {
    "llama": Family("llama"),
    "mistral, window": Family("mistral", {"sliding_window": WINDOW}),
    "qwen2": Family("qwen2"),
    "qwen2, mixed windows": Family(
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "qwen3": Family("qwen3"),
}


class Twin:
    """A model as transformers runs it, which is what everybody else has to agree with."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}  # by all token ids

    def rows(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> torch.Tensor:
        """Return the logits that predict each id of the answer, ``[len(answer), vocab]`` float32.

        One forward over prompt and answer, alone and without a cache.
        """
        token_ids = prompt + answer
        if token_ids not in self._rows:
            with torch.no_grad():
                self._rows[token_ids] = self._model(torch.tensor([token_ids])).logits[0].float()
        return self._rows[token_ids][len(prompt) - 1 : -1]

    def generate(self, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        """Return the ids of ``transformers.generate``, greedy, never stopping early."""
        return tuple(greedy_by_transformers(self._model, prompt, num_tokens))


def make_twin(family: Family, folder: Path) -> Twin:
    """Save a random model of the family, with a tokenizer, in the folder; return its twin."""
    model = build_tiny_model(family.model_type, **family.options)
    model.save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)
    model.set_attn_implementation(family.attention)
    return Twin(model)
