"""Asking a model, with a few tokens, what its attention layers need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.external.interface import PROBE, STEP_KEYWORD, AttentionCall
from headrace_worker.model.external.masks import MaskShape

# Keywords that say nothing beyond what a packed step knows; dropout is for training only.
_HARMLESS = frozenset(
    {"scaling", "softcap", "sliding_window", "dropout", "position_ids", "is_causal", "use_cache"}
)
# What the people who choose a model call it.
_MEANINGS = {"s_aux": "attention sinks (s_aux) are"}


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What the KV cache and a packed step must know of a model."""

    hidden_size: int  # elements of what the head takes
    num_heads: int  # query heads
    num_kv_heads: int  # divides num_heads
    head_dim: int  # elements of queries, keys and values alike
    windows: tuple[int | None, ...]  # per layer: sliding window in tokens; None is full attention

    @property
    def num_layers(self) -> int:
        """Number of attention layers."""
        return len(self.windows)


@dataclass(frozen=True, slots=True)
class _LayerFacts:
    """What one call to the attention showed."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True, slots=True)
class _ProbeStep:
    """Checks and notes each call, and answers with something of the right shape."""

    num_positions: int  # longest sequence in tokens
    seen: list[_LayerFacts] = field(default_factory=list)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the values, repeated to as many heads as the query has."""
        _refuse_options(call)
        (num_heads, head_dim), num_kv_heads = call.query.shape[1:], call.key.shape[1]
        sizes = {tensor.shape[-1] for tensor in (call.query, call.key, call.value)}
        if len(sizes) > 1 or call.value.shape[1] != num_kv_heads or num_heads % num_kv_heads:
            raise ModelLoadError(
                "keys, values and queries of unlike heads are not supported: "
                + ", ".join(str(tuple(t.shape[1:])) for t in (call.key, call.value, call.query))
            )
        window = _window(call, self.num_positions)
        self.seen.append(_LayerFacts(call.layer, num_heads, num_kv_heads, head_dim, window))
        return call.value.repeat_interleave(num_heads // num_kv_heads, dim=1)


def probe_attention(model: Any, token_ids: torch.Tensor) -> AttentionFacts:
    """Run ``[1, num_tokens]`` ids through the model's body and return what its layers asked for.

    Raises:
        ModelLoadError: a layer needs what no attention backend offers, or the layers differ.
    """
    step = _ProbeStep(model.config.max_position_embeddings)
    model.set_attn_implementation(PROBE)
    positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
    output = model.get_decoder()(
        input_ids=token_ids, position_ids=positions, use_cache=False, **{STEP_KEYWORD: step}
    )
    num_layers = model.config.num_hidden_layers
    if [facts.layer for facts in step.seen] != list(range(num_layers)):
        raise ModelLoadError(
            f"attention ran in layers {[facts.layer for facts in step.seen]} of {num_layers}:"
            " other kinds of layers, or shared ones, are not supported"
        )
    shapes = {(facts.num_heads, facts.num_kv_heads, facts.head_dim) for facts in step.seen}
    if len(shapes) > 1:
        raise ModelLoadError(f"heads that differ by layer are not supported: {sorted(shapes)}")
    hidden_size = int(output.last_hidden_state.shape[-1])
    return AttentionFacts(hidden_size, *shapes.pop(), tuple(facts.window for facts in step.seen))


def _refuse_options(call: AttentionCall) -> None:
    for name, value in call.options.items():
        if name not in _HARMLESS and value is not None and value is not False:
            what = _MEANINGS.get(name, f"attention with {name!r} is")
            raise ModelLoadError(f"{what} not supported")
    if call.options.get("is_causal") is False:
        raise ModelLoadError("attention that looks ahead (is_causal=False) is not supported")


def _window(call: AttentionCall, num_positions: int) -> int | None:
    """Return the layer's window, on which its mask and its keyword must agree where both speak."""
    named = call.options.get("sliding_window")
    named = None if named is None or named >= num_positions else int(named)
    if call.mask is None:
        return named
    if not isinstance(call.mask, MaskShape):
        raise ModelLoadError("an attention mask of the model's own making is not supported")
    if named not in (None, call.mask.window):
        raise ModelLoadError(
            f"the mask of layer {call.layer} has window {call.mask.window}, its attention {named}"
        )
    return call.mask.window
