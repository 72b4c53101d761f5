"""The parts of the transformers backend: masks, products, the proof, and the function it calls."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.pytorch_utils import Conv1D

from headrace_worker.model import ModelLoadError
from headrace_worker.model.external.check import check_decoder, plain_logits, sample_tokens
from headrace_worker.model.external.decoder import ExternalDecoder
from headrace_worker.model.external.interface import PACKED
from headrace_worker.model.external.masks import find_window
from headrace_worker.model.external.packing import PackedMatrix, _Packer, pack_model
from headrace_worker.model.external.probe import probe_attention
from support.external_models import EXTERNAL_MODELS, MIXTURES, build_external_model
from support.tiny_models import build_tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [1, 2, 7, 63, 99])
def test_a_window_is_found_exactly(window: int) -> None:
    """transformers' window counts a token itself, as ours does."""
    assert find_window(sliding_window_causal_mask_function(window), 100) == window


def test_a_causal_mask_has_no_window() -> None:
    """Nor has a window that is never reached."""
    assert find_window(causal_mask_function, 100) is None
    assert find_window(sliding_window_causal_mask_function(100), 100) is None


@pytest.mark.parametrize("chunk", [10, 30, 50, 99])
def test_chunked_attention_is_no_window(chunk: int) -> None:
    """It looks like one from the last token of a chunk only."""
    mask = chunked_causal_mask_function(chunk, torch.tensor([0]))
    with pytest.raises(ModelLoadError, match="neither causal nor a sliding window"):
        find_window(mask, 100)


def test_looking_ahead_is_no_window() -> None:
    """A mask of an encoder is refused."""
    with pytest.raises(ModelLoadError, match="neither causal nor a sliding window"):
        find_window(bidirectional_mask_function, 100)


def adapted(model: Any) -> tuple[Any, ...]:
    """Return decoder, facts, tokens and what the uncut model says of them."""
    token_ids = sample_tokens(320, CPU)
    expected = plain_logits(model, token_ids)
    with torch.inference_mode():
        facts = probe_attention(model, token_ids[:1])
    return ExternalDecoder(model, facts.windows, 0), facts, token_ids, expected


def test_the_proof_notices_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that attends to too little is not served."""
    decoder, *rest = adapted(build_external_model("gpt2"))
    check_decoder(decoder, *rest, torch.float32)
    monkeypatch.setattr(decoder, "_windows", (2, None))
    with pytest.raises(ModelLoadError, match="logits differ by"):
        check_decoder(decoder, *rest, torch.float32)


@pytest.mark.parametrize("name", ["granite", "cohere"])
def test_the_proof_notices_a_head_that_does_less(name: str) -> None:
    """A factor on the logits that were left out would change every probability."""
    decoder, facts, token_ids, expected = adapted(build_external_model(name))
    with pytest.raises(ModelLoadError, match="logits differ by"):
        check_decoder(decoder, facts, token_ids, 1.01 * expected, torch.float32)


def test_the_proof_notices_what_is_no_number() -> None:
    """NaN compares as different."""
    decoder, facts, token_ids, expected = adapted(build_external_model("gpt2"))
    with pytest.raises(ModelLoadError, match="differ by nan"):
        check_decoder(decoder, facts, token_ids, expected * float("nan"), torch.float32)


def test_the_head_is_the_models_own() -> None:
    """Scale and soft cap come from its own forward."""
    model = build_tiny_model("gemma2", final_logit_softcapping=3.0)
    rows = torch.randn(5, 64)
    with torch.no_grad():
        expected = 3.0 * torch.tanh(model.lm_head(rows) / 3.0)
    decoder = ExternalDecoder(model, (None, None), 0)
    torch.testing.assert_close(decoder.logits(rows), expected)


def test_attention_without_a_step_says_so() -> None:
    """A model that keeps the batch from its attention is named, and computes nothing."""
    model = build_external_model("gpt2")
    model.set_attn_implementation(PACKED)
    with pytest.raises(ModelLoadError, match="GPT2Attention keeps the batch"):
        model(input_ids=torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize("name", ["gpt2", "phi", *MIXTURES])
def test_packing_computes_the_same(name: str) -> None:
    """Linear, transposed, stacked and routers' matrices give what they gave."""
    model = build_external_model(name)
    token_ids = sample_tokens(320, CPU)
    expected = plain_logits(model, token_ids)
    pack_model(model)
    assert not any(type(module) is nn.Linear for module in model.modules())
    torch.testing.assert_close(plain_logits(model, token_ids), expected, atol=1e-4, rtol=0)


def test_experts_of_an_unusual_form_stay_as_they_are() -> None:
    """Biased and interleaved ones are computed by transformers' own code."""
    model = build_tiny_model("gpt_oss", num_local_experts=2)
    before = [type(layer.mlp.experts) for layer in model.model.layers]
    pack_model(model)
    assert [type(layer.mlp.experts) for layer in model.model.layers] == before


def test_a_packed_matrix_is_a_tensor_otherwise() -> None:
    """Only the product through functional.linear is another's."""
    model = build_external_model("qwen3-moe")
    plain = model.model.layers[0].mlp.gate.weight.detach().clone()
    pack_model(model)
    matrix = model.model.layers[0].mlp.gate.weight
    assert isinstance(matrix, PackedMatrix)
    x = torch.randn(2, 3, 64)
    torch.testing.assert_close(functional.linear(x, matrix), functional.linear(x, plain))
    assert torch.equal(matrix @ torch.ones(64), plain @ torch.ones(64))
    rows = torch.randn(40, 64)
    few = [
        torch.equal(functional.linear(rows[:n], matrix), functional.linear(rows, matrix)[:n])
        for n in (1, 2, 7)
    ]
    assert all(few)


@pytest.mark.parametrize("name", ["gpt2", "olmo2", "qwen3-moe"])
def test_packing_holds_no_matrix_but_one_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module is gone by the time the next is packed: a large model fits in memory once."""
    model = build_external_model(name)
    done: list[weakref.ref[nn.Module]] = []
    replace = _Packer.replace

    def watch(packer: _Packer, module: nn.Module) -> nn.Module | None:
        replacement = replace(packer, module)
        has_matrix = isinstance(module, nn.Linear | Conv1D)
        assert [reference for reference in done[:-1] if reference() is not None] == []
        if replacement is not None and has_matrix:
            done.append(weakref.ref(module))
        return replacement

    monkeypatch.setattr(_Packer, "replace", watch)
    pack_model(model)
    assert len(done) > 4


@pytest.mark.parametrize("num_threads", [1, 3, 5])
@pytest.mark.parametrize("name", ["starcoder2-window", "olmo2", "qwen3-moe"])
def test_company_changes_no_bit_on_many_threads(name: str, num_threads: int) -> None:
    """Its activations and products give a row the same bits on any number of threads."""
    feed_forward = wide_feed_forward(name)
    rows = torch.randn(130, 64, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            together = feed_forward(rows[None])[0]
            alone = torch.cat([feed_forward(row[None, None])[0] for row in rows])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, alone)


def wide_feed_forward(name: str) -> Any:
    """Return a packed feed-forward layer wide enough for several threads and no whole vectors."""
    family, options = EXTERNAL_MODELS[name]
    width = {"moe_intermediate_size" if "moe" in name else "intermediate_size": 4020}
    model = build_tiny_model(family, **{**options, **width})
    pack_model(model)
    return model.model.layers[0].mlp


def test_nothing_is_drawn_on_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A worker's stderr is its log; transformers' progress bar stays off it."""
    from headrace_worker.model import load_model

    build_external_model("gpt2").save_pretrained(tmp_path)
    capfd.readouterr()
    load_model(tmp_path, dtype=torch.float32, device=CPU)
    assert capfd.readouterr().err == ""
