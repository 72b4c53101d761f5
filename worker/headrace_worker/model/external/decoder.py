"""A model of transformers as the runner sees it: packed forward, then logits of chosen rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headrace_worker.attention.base import AttentionBackend, PackedBatch
from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.external.interface import PACKED, STEP_KEYWORD, PackedStep


@dataclass(frozen=True, slots=True)
class ExternalConfig:
    """What the engine needs to know of a model that transformers computes."""

    architecture: str  # transformers' model_type
    vocab_size: int  # width of the logits; may exceed the tokenizer's vocabulary
    hidden_size: int
    intermediate_size: int  # width of the widest product of a layer
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int  # divides num_heads
    head_dim: int  # elements
    max_position_embeddings: int  # longest sequence in tokens that the positions are made for
    windows: tuple[int | None, ...]  # per layer: sliding window in tokens; None is full attention
    eos_token_ids: tuple[int, ...]  # any of them ends a sequence
    length_limit_reason: str | None = None  # why no sequence may be longer, if the rope says so


class ExternalDecoder:
    """A causal model cut in two: its body computes packed batches, its head takes their rows.

    The head runs through the model's own forward, with the body replaced by a passage. So whatever
    the model does to its logits (scale, soft cap) is done, without our knowing it.
    """

    def __init__(self, model: Any, windows: tuple[int | None, ...], weights_bytes: int) -> None:
        """Cut ``model``, which is not to be used otherwise from here on."""
        model.set_attn_implementation(PACKED)
        self._body = model.get_decoder()
        self._head = model
        self._windows = windows
        _replace(model, self._body, _Passage())
        self.weights_bytes = weights_bytes  # tied weights counted once

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, backend: AttentionBackend) -> torch.Tensor:
        """Return hidden states ``[num_tokens, hidden_size]`` as the head takes them."""
        backend.begin(batch)
        output = self._body(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            **{STEP_KEYWORD: PackedStep(batch, backend, self._windows)},
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return float32 logits ``[num_rows, vocab_size]`` of ``[num_rows, hidden_size]``."""
        logits: torch.Tensor = self._head(inputs_embeds=rows[None], use_cache=False).logits[0]
        return logits.float()

    def pack(self) -> int:
        """Do nothing: the weights were laid out when they were loaded, and counted."""
        return 0


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    path = next(name for name, module in model.named_modules() if module is old)
    if not path:
        raise ModelLoadError(f"{type(model).__name__} has no body to be told from its head")
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, new)


class _Passage(nn.Module):
    """Stands in for the body: what is given as embeddings comes out as hidden states."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        inputs_embeds: torch.Tensor,  # [1, num_rows, hidden_size]
        **_: object,
    ) -> _BodyOutput:
        """Pass ``inputs_embeds`` on."""
        return _BodyOutput(inputs_embeds)


class _BodyOutput:
    """The output of a body that kept nothing but hidden states."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        """No cache, no attentions, no router's logits: families call them by many names."""
        return None
