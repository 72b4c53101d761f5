"""The attention function that transformers' models call: it hands over to the step under way.

A step travels through the model as one more keyword, so several engines may live in one process:
nothing here remembers anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from headrace_worker.attention.base import AttentionBackend, PackedBatch
from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.external.masks import describe_mask

PACKED = "headrace"  # transformers builds no mask for an implementation that registers none
PROBE = "headrace_probe"  # masks are described, not built
STEP_KEYWORD = "headrace_step"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one attention layer of a model asks for, as rows of the packed batch."""

    layer: int
    query: torch.Tensor  # [num_tokens, heads, head_dim]
    key: torch.Tensor  # [num_tokens, kv_heads, head_dim]
    value: torch.Tensor  # [num_tokens, kv_heads, head_dim]
    mask: object  # what the model's mask function returned
    options: Mapping[str, Any]  # the other keywords, by transformers' names

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        scaling = self.options.get("scaling")
        return float(self.query.shape[-1] ** -0.5 if scaling is None else scaling)

    @property
    def soft_cap(self) -> float | None:
        """The soft cap of the scores."""
        return self.options.get("softcap")


class Step(Protocol):
    """What a forward pass carries from the decoder to its attention layers."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention output ``[num_tokens, heads, head_dim]``."""
        ...


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One packed batch on its way through the layers."""

    batch: PackedBatch
    backend: AttentionBackend
    windows: tuple[int | None, ...]  # per layer, in tokens

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Write the new keys and values to the cache, and attend through it."""
        self.backend.write_kv(call.layer, call.key, call.value, self.batch)
        return self.backend.attend(
            call.query,
            call.layer,
            self.batch,
            scale=call.scale,
            window=self.windows[call.layer],
            soft_cap=call.soft_cap,
        )


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, kv_heads, num_tokens, head_dim]
    value: torch.Tensor,  # [1, kv_heads, num_tokens, head_dim]
    attention_mask: object,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return ``[1, num_tokens, heads, head_dim]``, and no weights."""
    step: Step | None = options.pop(STEP_KEYWORD, None)
    layer = getattr(module, "layer_idx", None)
    if step is None or not isinstance(layer, int):
        raise ModelLoadError(
            f"{type(module).__name__} keeps the batch or its layer's number from the attention"
        )
    call = AttentionCall(layer, _rows(query), _rows(key), _rows(value), attention_mask, options)
    return step.attend(call)[None], None


def _rows(heads: torch.Tensor) -> torch.Tensor:
    return heads[0].transpose(0, 1).contiguous()


# The registry is transformers' own; what is registered has no state.
for _name in (PACKED, PROBE):
    AttentionInterface.register(_name, _attention)
AttentionMaskInterface.register(PROBE, describe_mask)
