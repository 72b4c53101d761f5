"""What a layer asks of the attention is understood or refused, whatever model it belongs to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from headrace_worker.model import ModelLoadError
from headrace_worker.model.external.interface import PROBE
from headrace_worker.model.external.masks import MaskShape
from headrace_worker.model.external.probe import AttentionFacts, probe_attention

NUM_POSITIONS = 100
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


class Layer(nn.Module):
    """One attention layer, which asks what it is told to ask."""

    def __init__(self, layer_idx: int | None, mask: object = None, **options: Any) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.mask = mask
        self.sizes = {"value": (KV_HEADS, HEAD_DIM), **options.pop("sizes", {})}
        self.options = options

    def forward(self, num_tokens: int, **kwargs: Any) -> None:
        """Call the attention as transformers' layers do."""

        def heads(count: int, size: int) -> torch.Tensor:
            return torch.randn(1, count, num_tokens, size)

        shapes = {"query": (HEADS, HEAD_DIM), "key": (KV_HEADS, HEAD_DIM), **self.sizes}
        tensors = [heads(*shapes[name]) for name in ("query", "key", "value")]
        output, weights = AttentionInterface()[PROBE](
            self, *tensors, self.mask, **self.options, **kwargs
        )
        assert output.shape == (1, num_tokens, HEADS, HEAD_DIM)
        assert weights is None


class Model(nn.Module):
    """A model of nothing but such layers."""

    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.config = SimpleNamespace(
            max_position_embeddings=NUM_POSITIONS, num_hidden_layers=len(layers)
        )

    def set_attn_implementation(self, name: str) -> None:
        """Take what is asked for."""
        assert name == PROBE

    def get_decoder(self) -> Model:
        """The body is all there is."""
        return self

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """Run the layers, with the keywords that they may see."""
        for name in ("position_ids", "use_cache"):
            kwargs.pop(name)
        for layer in self.layers:
            layer(input_ids.shape[1], **kwargs)
        return SimpleNamespace(last_hidden_state=torch.zeros(1, input_ids.shape[1], 32))


def probe(*layers: Layer) -> AttentionFacts:
    """Probe a model of these layers."""
    return probe_attention(Model(*layers), torch.tensor([[1, 2, 3]]))


def test_layers_are_described_by_what_they_send() -> None:
    """Heads, their size, and each layer's window."""
    facts = probe(Layer(0, MaskShape(9)), Layer(1, MaskShape(None)), Layer(2, sliding_window=7))
    assert (facts.hidden_size, facts.num_heads, facts.num_kv_heads) == (32, HEADS, KV_HEADS)
    assert (facts.num_layers, facts.head_dim) == (3, HEAD_DIM)
    assert facts.windows == (9, None, 7)


@pytest.mark.parametrize("named", [None, 9])
def test_a_mask_and_a_keyword_that_agree_are_one_window(named: int | None) -> None:
    """transformers states the window twice: for kernels with and without a mask."""
    assert probe(Layer(0, MaskShape(9), sliding_window=named)).windows == (9,)


def test_a_window_beyond_every_sequence_is_none() -> None:
    """It hides nothing."""
    assert probe(Layer(0, MaskShape(None), sliding_window=NUM_POSITIONS)).windows == (None,)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Layer(0, MaskShape(9), sliding_window=8), "layer 0 has window 9, its attention 8"),
        (Layer(0, MaskShape(None), sliding_window=8), "window None, its attention 8"),
        (Layer(0, torch.zeros(1, 1, 3, 3)), "a mask|mask of the model's own making"),
        (Layer(0, is_causal=False), "is_causal=False"),
        (Layer(0, s_aux=torch.zeros(HEADS)), r"attention sinks \(s_aux\)"),
        (Layer(0, position_bias=torch.zeros(3)), "attention with 'position_bias'"),
        (Layer(0, sizes={"value": (KV_HEADS, 6)}), r"unlike heads .*\(2, 8\), \(2, 6\), \(4, 8\)"),
        (Layer(0, sizes={"key": (3, 8), "value": (3, 8)}), "unlike heads"),
        (Layer(None), "Layer keeps the batch or its layer's number"),
    ],
)
def test_what_our_attention_does_not_do_is_refused(layer: Layer, message: str) -> None:
    """Each by its name, with the value."""
    with pytest.raises(ModelLoadError, match=message):
        probe(layer)


def test_options_that_are_off_are_no_hindrance() -> None:
    """None and False ask for nothing; dropout is for training."""
    probe(Layer(0, dropout=0.0, s_aux=None, output_attentions=False, is_causal=True))


@pytest.mark.parametrize("indices", [(0, 0), (0, 2), (1, 0)])
def test_layers_that_share_or_skip_numbers_are_refused(indices: tuple[int, int]) -> None:
    """The KV cache has one place for each layer, in order."""
    with pytest.raises(ModelLoadError, match="of 2"):
        probe(*(Layer(index) for index in indices))


def test_layers_with_unlike_heads_are_refused() -> None:
    """The KV cache has one shape for all layers."""
    wide = {"query": (HEADS, 8), "key": (4, 8), "value": (4, 8)}
    with pytest.raises(ModelLoadError, match="heads that differ by layer"):
        probe(Layer(0), Layer(1, sizes=wide))
