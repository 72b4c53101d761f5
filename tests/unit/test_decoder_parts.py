"""The parts of a layer: norms, activations, embeddings and caps round as transformers' do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from headrace_worker.model.activations import ACTIVATIONS
from headrace_worker.model.norm import Norm
from support.native import decoder_of, load
from support.tiny_models import build_tiny_model

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("theirs", [LlamaRMSNorm, Gemma2RMSNorm])
def test_norms_have_the_bits_of_transformers(theirs: Any, dtype: torch.dtype) -> None:
    """Gemma multiplies by 1 + weight before the cast, all others by weight after it."""
    torch.manual_seed(0)
    x = (3 * torch.randn(7, 48)).to(dtype)
    norm = theirs(48, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    ours = Norm(norm.weight.detach(), 1e-5, is_centred=theirs is Gemma2RMSNorm)
    assert torch.equal(ours(x), norm(x))
    assert ours(x).dtype == dtype


@DTYPES
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_have_the_bits_of_transformers(name: str, dtype: torch.dtype) -> None:
    """An activation is the one that transformers has under the same name."""
    x = torch.linspace(-9, 9, 1001).to(dtype)
    assert torch.equal(ACTIVATIONS[name](x), ACT2FN[name](x))


@DTYPES
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
def test_embeddings_have_the_bits_of_transformers(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    """Gemma's embedding is scaled by a root that is first rounded to the number format."""
    source = build_tiny_model(family, hidden_size=72, head_dim=16)
    source.save_pretrained(tmp_path)
    token_ids = torch.arange(320)
    embedded = decoder_of(load(tmp_path, dtype)).embed(token_ids)
    assert torch.equal(embedded, source.to(dtype).model.embed_tokens(token_ids))
    if family != "llama":
        exact = source.model.embed_tokens.weight.float() * 72**0.5
        is_rounded = (embedded.float() / exact).nanmean().sub(1).abs() > 1e-3
        assert bool(is_rounded) is (dtype == torch.bfloat16)


@DTYPES
def test_capped_logits_have_the_bits_of_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    """The cap is applied in the model's number format, which the answer keeps."""
    source = build_tiny_model("gemma2", final_logit_softcapping=2.0)
    source.save_pretrained(tmp_path)
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits = decoder_of(load(tmp_path, dtype)).logits(rows)
    with torch.no_grad():
        expected = 2.0 * torch.tanh(source.to(dtype).lm_head(rows) / 2.0)
    assert torch.equal(logits, expected)
    assert logits.abs().max() <= 2.0
