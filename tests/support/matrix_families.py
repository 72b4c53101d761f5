"""The models of the matrix: tiny random ones of every family, and their twins in transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from support.external_models import build_external_model
from support.packed import greedy_by_transformers
from support.tiny_models import build_tiny_model, build_tiny_tokenizer

WINDOW = 20  # tokens, less than most prompts of the matrix
EXTERNAL = ("gpt2", "cohere2-windows", "mixtral-window")  # run by transformers' own model code

FAMILIES: dict[str, Callable[[], Any]] = {  # name → makes transformers' model
    "llama": partial(build_tiny_model, "llama"),
    "mistral-window": partial(build_tiny_model, "mistral", sliding_window=WINDOW),
    "qwen2": partial(build_tiny_model, "qwen2"),
    "qwen2-windows": partial(
        build_tiny_model,
        "qwen2",
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
    "qwen3": partial(build_tiny_model, "qwen3"),
    "smollm3": partial(build_tiny_model, "smollm3"),
    "phi3": partial(build_tiny_model, "phi3", partial_rotary_factor=0.75),
    "gemma2": partial(build_tiny_model, "gemma2"),
    "gemma3": partial(build_tiny_model, "gemma3_text"),
    **{f"external-{name}": partial(build_external_model, name) for name in EXTERNAL},
}


class Twin:
    """A model as transformers runs it, which is what everybody else has to agree with."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}  # of all token ids, by these

    def rows(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        """Return the logits behind each token, ``[len(token_ids), vocab]`` float32.

        One forward over all of them, alone and without a cache.
        """
        if token_ids not in self._logits:
            with torch.no_grad():
                self._logits[token_ids] = self._model(torch.tensor([token_ids])).logits[0].float()
        return self._logits[token_ids]

    def generate(self, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        """Return the ids of ``transformers.generate``, greedy, never stopping early."""
        return tuple(greedy_by_transformers(self._model, prompt, num_tokens))


def make_twin(family: str, folder: Path) -> Twin:
    """Save a random model of the family, with a tokenizer, in the folder; return its twin."""
    model = FAMILIES[family]()
    model.save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)
    return Twin(model)
